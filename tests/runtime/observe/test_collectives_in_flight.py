"""What the records of collectives say side by side: who has not come to where the others wait."""

import json
import time
from pathlib import Path

import pytest

from xtrain.runtime.observe.stacks import read, read_collectives

ALL = ("0", "default_pg")


def entry(number: int, name: str = "all_reduce", group: tuple[str, str] = ALL, **given) -> dict:
    """As torch's flight recorder writes one of gloo that has ended."""
    fields = {
        "collective_seq_id": number, "p2p_seq_id": 0, "record_id": number, "is_p2p": False, "retired": True,
        "state": "scheduled", "profiling_name": f"gloo:{name}", "process_group": list(group), "input_sizes": [[4]],
    }  # fmt: skip
    return {**fields, **given}


def under_way(number: int, name: str = "all_reduce", group: tuple[str, str] = ALL, **given) -> dict:
    return entry(number, name, group, retired=False, **given)


@pytest.fixture
def sentences(tmp_path):
    """What is read of ranks with these entries, of groups with these ranks; None: a rank that has written nothing."""

    def write(*ranks: list[dict] | None, groups: dict[str, list[int]] | None = None) -> list[str]:
        for rank, entries in enumerate(ranks):
            if entries is not None:
                content = {"entries": entries, "groups": groups or {"0": [*range(len(ranks))]}}
                (tmp_path / f"{rank:05d}.collectives.json").write_text(json.dumps(content))
        return read(read_collectives(tmp_path, len(ranks)), len(ranks))

    return write


def test_a_rank_that_has_not_come_is_named_with_the_last_it_was_in(sentences):
    waits = [entry(117, "all_gather"), under_way(118)]
    assert sentences(waits, waits, [entry(117, "all_gather")], waits) == [
        "ranks 0, 1 and 3 wait in all_reduce 118 of all ranks; rank 2 did not enter all_reduce 118 of all ranks "
        "(the last one there was all_gather 117 of all ranks)"
    ]


def test_each_group_has_its_own_numbers_and_members(sentences):
    """Two groups of two: ranks 0 and 2 wait for nobody but each other's partners."""
    one, two = ("5", "mesh_shard"), ("6", "mesh_tp")
    groups = {"0": [0, 1, 2, 3], "5": [0, 1], "6": [2, 3]}
    found = sentences([under_way(9, "all_gather", one)], [entry(8, "all_gather", one)], [under_way(3, group=two)], None,
                 groups=groups)  # fmt: skip
    assert found == [
        "rank 0 waits in all_gather 9 along fsdp; rank 1 did not enter all_gather 9 along fsdp "
        "(the last one there was all_gather 8 along fsdp)",
        "rank 2 waits in all_reduce 3 along tp; no record from rank 3",
    ]


def test_ranks_that_do_different_things_are_reported(sentences):
    found = sentences([under_way(4)], [under_way(4, "broadcast", input_sizes=[[8, 2]])])
    assert found == [
        "ranks have entered different collectives as number 4 of one group: rank 0 all_reduce of 4, "
        "rank 1 broadcast of 8×2"
    ]


def test_the_first_that_has_not_ended_counts_and_what_is_left_already_is_reported(sentences):
    ahead = [under_way(7), under_way(8)]
    assert sentences(ahead, [entry(7), entry(8)]) == [
        "rank 0 waits in all_reduce 7 of all ranks; rank 1 has already left this collective"
    ]
    assert sentences([under_way(7)], [under_way(7)]) == [
        "ranks 0 and 1 wait in all_reduce 7 of all ranks, which all ranks have entered"
    ]


def test_messages_between_two_are_reported_for_each_rank(sentences):
    message = under_way(0, "recv 0<-1", is_p2p=True, p2p_seq_id=6)
    assert sentences([message], [entry(3)]) == ["rank 0 waits in recv 0<-1 6 of all ranks"]


def test_what_cannot_be_read_and_ranks_that_wait_for_nobody_say_nothing(sentences, tmp_path: Path):
    (tmp_path / "00002.collectives.json").write_text('{"entries": [{"half')
    assert sentences([entry(1)], [entry(1)], None) == []


def test_many_ranks_are_read_fast_and_reported_briefly(sentences):
    history = [entry(number) for number in range(1, 200)]
    begin = time.process_time()
    (sentence,) = sentences(*[[*history, under_way(200)]] * 63, history)
    assert time.process_time() - begin < 5
    assert sentence.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 55 more wait in all_reduce 200")
    assert "rank 63 did not enter" in sentence
