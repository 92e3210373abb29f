"""A program that trains a model of transformers by DeepSpeed's engine and saves as that does: on each rank
`python deepspeed_program.py STAGE FOLDER [tied]`. Tied: also one layer is frozen."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def main(stage: int, folder: str, *, tied: bool) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    config = LlamaConfig(vocab_size=97, num_hidden_layers=2, tie_word_embeddings=tied, **SIZES)
    model = LlamaForCausalLM(config)
    if tied:
        model.model.layers[0].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [[each for each in trained if each.ndim > 1], [each for each in trained if each.ndim == 1]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    for _ in range(2):
        tokens = torch.randint(0, 97, (2, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder)
    if dist.get_rank() == 0:
        config.save_pretrained(f"{folder}-model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], tied="tied" in sys.argv)
