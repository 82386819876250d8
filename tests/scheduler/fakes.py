"""A device without tensors: it keeps what each cache slot holds and fails if a batch reads what was not written."""

from hydrainfer.cache import CacheSet, CacheSpec, embed_ranges
from hydrainfer.core import MediaSpan, Request, SamplingParams, StepBatch, StepResult, TokenWork

KV = CacheSpec.full(layers=1, kv_heads=1, head_dim=1, dtype="float32", block_tokens=4)
EMBED = CacheSpec.embed(width=1, dtype="float32", block_tokens=4)


def make_caches(kv_blocks=64, embed_blocks=32):
    return CacheSet({KV: kv_blocks, EMBED: embed_blocks})


def make_request(name, n_text=5, pictures=(), max_tokens=8, picture_tokens=6, **kw):
    """`pictures`: content numbers; equal numbers are the same picture."""
    media, ids = [], [1]
    for p in pictures:
        media.append(MediaSpan(len(ids), picture_tokens, b"picture%d" % p, f"px{p}"))
        ids += [0] * picture_tokens
    ids += [2 + i % 7 for i in range(max(n_text - 1, 0))]
    sampling = kw.pop("sampling", SamplingParams(max_tokens=max_tokens))
    return Request(
        id=name, prompt_ids=tuple(ids), sampling=sampling, max_tokens=max_tokens, seed=0, media=tuple(media), **kw
    )


def expected_tokens(request):
    """What `FakeDevice` answers: a function of the prompt and of everything produced so far, as a model's answer is."""
    tokens = list(request.prompt_ids)
    while len(tokens) - request.n_prompt < request.max_tokens:
        tokens.append(_next_token(tokens))
        if tokens[-1] in request.eos_ids:
            break
    return tokens[request.n_prompt :]


def _next_token(tokens):
    return 10 + sum((i + 1) * t for i, t in enumerate(tokens)) % 97


class FakeDevice:
    """Executes batches at once. `kv[(block, offset)] = (position, token)`, `embed[block] = (key, part)`."""

    def __init__(self):
        self.kv = {}
        self.embed = {}
        self.n_encoded = {}
        self.batches = []

    def run(self, batch: StepBatch) -> StepResult:
        self.batches.append((batch.lane, batch.n_items, [item.seq.id for item in batch.work]))
        result = StepResult(batch)
        for item in batch.work:
            if isinstance(item, TokenWork):
                self._tokens(item, result)
            else:
                self._encode(item)
        return result

    def _encode(self, item):
        span = item.seq.request.media[item.index]
        self.n_encoded[span.key] = self.n_encoded.get(span.key, 0) + 1
        for part, i in enumerate(embed_ranges(item.seq.request, EMBED)[item.index]):
            self.embed[item.seq.blocks["embed"][i]] = (span.key, part)

    def _tokens(self, item, result):
        seq, blocks = item.seq, item.seq.blocks["kv"]
        assert item.start == seq.n_computed
        end = item.start + item.count
        for span, picture in zip(seq.request.media, embed_ranges(seq.request, EMBED)):
            if max(item.start, span.start) < min(end, span.start + span.n_tokens):
                held = [self.embed[seq.blocks["embed"][i]] for i in picture]
                assert held == [(span.key, part) for part in range(len(picture))], "prefill read a foreign embedding"
        for p in range(item.start, end):
            self.kv[(blocks[p // 4], p % 4)] = (p, seq.tokens[p])
        read = [self.kv[(blocks[p // 4], p % 4)] for p in range(end)]
        assert read == [(p, t) for p, t in enumerate(seq.tokens[:end])], "attention read foreign keys"
        if item.sample:
            assert end == len(seq.tokens)
            result.tokens.append(_next_token(seq.tokens))
