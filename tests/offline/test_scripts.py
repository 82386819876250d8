"""Scripts in the style of vLLM's users, with the package's name changed: each runs, or says what comes nearest."""

from __future__ import annotations

import pytest
from PIL import Image

from hydrainfer import HydraError
from tests.checkpoints import make_llava
from tests.equivalence.mixed import image

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
CHAT = '[{"role": "user", "content": "Hello"}]'
PICTURE = '[{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]}]'
RUN = {
    "several prompts": """
from hydrainfer import LLM, SamplingParams
prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
llm = LLM(model=MODEL, tensor_parallel_size=1, trust_remote_code=True, enforce_eager=True, seed=0)
for output in llm.generate(prompts, sampling_params):
    said.append((output.prompt, output.outputs[0].text))
""",
    "a chat": """
from hydrainfer import LLM
llm = LLM(MODEL, gpu_memory_utilization=0.5, max_model_len=256, dtype="float")
params = llm.get_default_sampling_params()
params = type(params)(max_tokens=4)
outputs = llm.chat(messages=CHAT, sampling_params=params, use_tqdm=False, add_generation_prompt=True, lora_request=None)
said.append(outputs[0].outputs[0].text)
""",
    "pictures by limit": """
from hydrainfer import LLM, SamplingParams
llm = LLM(model=MODEL, max_num_seqs=2, max_num_batched_tokens=512, limit_mm_per_prompt={"image": 2})
prompt = "<image>\\nWhat is it?"
inputs = {"prompt": prompt, "multi_modal_data": {"image": SHOWN}}
said.append(llm.generate(inputs, sampling_params=SamplingParams(max_tokens=4))[0].outputs[0].token_ids)
""",
    "pictures in a chat": """
from hydrainfer import LLM, SamplingParams
llm = LLM(model=MODEL, limit_mm_per_prompt={"image": 1, "video": 0}, mm_processor_cache_gb=0, task="generate")
said.append(llm.chat(ASKED, SamplingParams(max_tokens=4, stop=["."], skip_special_tokens=True))[0].outputs[0].text)
""",
    "token ids": """
from hydrainfer import LLM, SamplingParams, TokensPrompt
llm = LLM(model=MODEL, skip_tokenizer_init=False, enable_prefix_caching=True)
tokenizer = llm.get_tokenizer()
prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(text)) for text in ("one", "two three")]
for one in llm.generate(prompts, SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)):
    said.append(len(one.outputs[0].token_ids))
""",
    "structured": """
from hydrainfer import LLM, SamplingParams, StructuredOutputsParams
llm = LLM(model=MODEL, structured_outputs_config={"backend": "xgrammar"})
params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]), max_tokens=30)
said.append(llm.generate("Classify: good", sampling_params=params)[0].outputs[0].text)
assert said[-1] in ("Positive", "Negative")
""",
    "log probabilities": """
from hydrainfer import LLM, SamplingParams
llm = LLM(model=MODEL, max_logprobs=20, disable_log_stats=True)
(out,) = llm.generate("One", SamplingParams(max_tokens=3, logprobs=5, prompt_logprobs=1, temperature=0))
said.append(out.outputs[0].cumulative_logprob)
assert out.prompt_logprobs[0] is None and out.finished
""",
    "several choices": """
from hydrainfer import LLM, SamplingParams
llm = LLM(model=MODEL, quantization=None, kv_cache_dtype="auto", block_size=16, swap_space=0)
(out,) = llm.generate(["One"], SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=5))
said.append([choice.text for choice in out.outputs])
""",
    "drafts": """
from hydrainfer import LLM, SamplingParams
llm = LLM(model=MODEL, speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
said.append(llm.generate(["a b a b a b"], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text)
""",
    "bad words": """
from hydrainfer import LLM, SamplingParams
llm = LLM(model=MODEL, load_format="auto", tokenizer_mode="auto", revision=None, compilation_config=3)
said.append(llm.generate(["a"], SamplingParams(max_tokens=8, bad_words=["the", "cat sat"]))[0].outputs[0].text)
""",
    "streaming": """
import asyncio
from hydrainfer import AsyncLLM, RequestOutputKind, SamplingParams
async def main():
    engine = AsyncLLM(model=MODEL, enforce_eager=True)
    params = SamplingParams(max_tokens=6, temperature=0, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(request_id="r", prompt="Tell", sampling_params=params):
        for completion in output.outputs:
            said.append(completion.text)
        if output.finished:
            break
    engine.shutdown()
asyncio.run(main())
""",
}
REFUSED = {
    "two devices": ("from hydrainfer import LLM\nLLM(model=MODEL, tensor_parallel_size=4)", "--layout 2EPD"),
    "lora": ("from hydrainfer import LLM\nLLM(model=MODEL, enable_lora=True, max_loras=1)", "merge them"),
    "embeddings": ("from hydrainfer import LLM\nLLM(model=MODEL, runner='pooling')", "embeddings and scores"),
    "embed": ("from hydrainfer import LLM\nwith LLM(MODEL) as llm:\n    llm.embed('x')", "embeddings and scores"),
    "a smaller cache": ("from hydrainfer import LLM\nLLM(MODEL, kv_cache_dtype='fp8')", "dtype of the model"),
    "engine arguments": ("from hydrainfer import EngineArgs", "take the options themselves"),
    "beams": ("from hydrainfer import BeamSearchParams", "sample several choices"),
    "processors": ("from hydrainfer import SamplingParams\nSamplingParams(logits_processors=[len])", "logit_bias"),
    "a template": (
        "from hydrainfer import LLM\nwith LLM(MODEL) as llm:\n    llm.chat(CHAT, chat_template='{{ x }}')",
        "as the name of a file",
    ),
    "lora of a request": (
        "from hydrainfer import LLM\nwith LLM(MODEL) as llm:\n    llm.generate('x', lora_request=object())",
        "merge them",
    ),
    "methods": ("from hydrainfer import LLM\nwith LLM(MODEL) as llm:\n    llm.sleep(level=1)", "start another one"),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    model = str(make_llava(tmp_path_factory.mktemp("llava")))
    shown = Image.new("RGB", (50, 40), "red")
    asked = eval(PICTURE, {"PICTURE": image(1)})
    return {"MODEL": model, "SHOWN": shown, "CHAT": eval(CHAT), "ASKED": asked}


@pytest.mark.parametrize("name", RUN)
def test_it_runs(names, name):
    scope = names | {"said": []}
    try:
        exec(RUN[name], scope)
    finally:
        if "llm" in scope:
            scope["llm"].close()
    assert scope["said"]


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_comes_nearest(names, name):
    script, says = REFUSED[name]
    with pytest.raises((HydraError, AttributeError, ImportError), match="not to be had here") as e:
        exec(script, dict(names))
    assert says in str(getattr(e.value, "message", e.value))
