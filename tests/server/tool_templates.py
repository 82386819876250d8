"""The parts about tools of families' published chat templates, shortened, with their formats and checks."""

HERMES = """{%- if tools %}<|im_start|>system
# Tools

You may call one or more functions. Their signatures are within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}<|im_start|>assistant
"""

LLAMA = """{{ bos_token }}{% for message in messages %}<|start_header_id|>
{{- "ipython" if message.role == "tool" else message.role }}<|end_header_id|>

{% if loop.first and tools %}Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}{% set call = message.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>

"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if message.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif -%}
{{ call.function | tojson | trim("}") }}}, "id": "{{ call.id }}"}{{ "," if not loop.last }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""  # noqa: E501

QWEN_CODER = """{%- if tools %}<|im_start|>system
# Tools

<tools>
{%- for tool in tools %}
<function>
<name>{{ tool.function.name }}</name>
<description>{{ tool.function.description }}</description>
<parameters>{% if tool.function.parameters is mapping %}{{ tool.function.parameters | tojson }}{% endif %}</parameters>
</function>
{%- endfor %}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
</function>
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}<|im_start|>assistant
"""

MISTRAL_ARGS = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}{{ message.content }}
{%- for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""  # noqa: E501

FUNCTION_GEMMA = """{{ bos_token }}{% if tools %}<start_of_turn>developer
{% for tool in tools %}<start_function_declaration>declaration:{{ tool.function.name }}{description:<escape>{{ tool.function.description }}<escape>}<end_function_declaration>{% endfor %}<end_of_turn>
{% endif %}{% for message in messages %}<start_of_turn>{{ "model" if message.role == "assistant" else message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<start_function_call>call:{{ call.function.name }}{
{%- for name, value in call.function.arguments | items %}{{ name }}:{% if value is string %}<escape>{{ value }}<escape>{% else %}{{ value | tojson }}{% endif %}{{ "," if not loop.last }}{% endfor %}}<end_function_call>
{%- endfor %}<end_of_turn>
{% endfor %}<start_of_turn>model
"""  # noqa: E501

PYTHONIC = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}
{% if loop.first and tools %}If you decide to call functions, put them in the format of
[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}
{%- if message.tool_calls %}[
{%- for call in message.tool_calls %}{{ call.function.name }}(
{%- for name, value in call.function.arguments | items %}{{ name }}={{ value | tojson }}{{ ", " if not loop.last }}{% endfor %}){{ ", " if not loop.last }}{% endfor %}]
{%- else %}{{ message.content }}{% endif %}<end_of_turn>
{% endfor %}<start_of_turn>model
"""  # noqa: E501

HARMONY_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
HARMONY = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}

# Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|># Tools

namespace functions {
{% for tool in tools %}
// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {{ (tool.function.parameters or {}) | tojson }}) => any;
{% endfor %}
} // namespace functions<|end|>
{%- endif %}
{%- set last = namespace(name="") %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- if "<|channel|>final<|message|>" in message.content %}{{ raise_exception("no marks here") }}{% endif %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("Cannot pass both content and thinking") }}{% endif %}
{%- set thought = message.content or message.thinking %}
{%- if thought %}<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}
{%- set last.name = call.name %}<|start|>assistant to=functions.{{ call.name -}}
<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- elif message.role == "tool" %}<|start|>functions.{{ last.name -}}
{{- " to=assistant<|channel|>commentary<|message|>" }}{{ message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}<|start|>assistant"""
