"""Chat templates that come with xtrain. What the assistant says stands between `generation` and `endgeneration`."""

_CHATML = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_LLAMA3 = """
{{- '<|begin_of_text|>' if bos_token == '<|begin_of_text|>' -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content | trim + '<|eot_id|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

_PLAIN = """
{%- for message in messages -%}
    {{- '\\n\\n' if not loop.first -}}
    {{- message.role | capitalize + ':' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- ' ' + message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '\\n\\nAssistant:' -}}
{%- endif -%}
"""

TEMPLATES = {"chatml": _CHATML, "llama3": _LLAMA3, "plain": _PLAIN}
