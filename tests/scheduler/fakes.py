"""A device without tensors: it keeps what each cache slot holds and fails if a batch reads what was not written."""

from collections import Counter

from hydrainfer.cache import DEVICE, CacheSet, EmbedSpec, FullSpec
from hydrainfer.core import (
    MediaSpan,
    Request,
    SamplingParams,
    Stage,
    StepBatch,
    StepResult,
    TokenWork,
    chain_of,
    chain_root,
)
from hydrainfer.core.chain import KEY_BYTES
from tests.cache.other_kinds import STATE, WINDOW

KV = FullSpec.of(layers=1, kv_heads=1, head_dim=1, dtype="float32", block_tokens=4)
EMBED = EmbedSpec.of(width=1, dtype="float32", block_tokens=4)


def make_caches(kv_blocks=64, embed_blocks=32, more=None):
    return CacheSet({KV: kv_blocks, EMBED: embed_blocks, **(more or {})})


def make_request(name, n_text=5, pictures=(), max_tokens=8, picture_tokens=6, salt=None, gaps=None, **kw):
    """`pictures`: content numbers; equal numbers are the same picture. `gaps`: those of pictures that have text inside,
    by number. With a `salt` it shares its KV."""
    media, ids = [], [1]
    for p in pictures:
        media.append(MediaSpan(len(ids), picture_tokens, b"picture%d" % p, f"px{p}", gaps=(gaps or {}).get(p, ())))
        ids += shown_ids(media[-1])
    ids += [2 + i % 7 for i in range(max(n_text - 1, 0))]
    sampling = kw.pop("sampling", SamplingParams(max_tokens=max_tokens))
    keys = b"" if salt is None else chain_of(chain_root(salt), ids, KV.block_tokens, media)
    return Request(
        id=name,
        prompt_ids=tuple(ids),
        sampling=sampling,
        max_tokens=max_tokens,
        seed=0,
        media=tuple(media),
        keys=keys,
        **kw,
    )


def shown_ids(span):
    """The ids of a picture: 0 for each placeholder, others between them."""
    ids, row = [], 0
    for after, n_others in (*span.gaps, (span.n_tokens, span.gaps[-1][1] if span.gaps else 0)):
        ids += [0] * (after - row)
        row = after
        ids += range(3, 3 + n_others - (len(ids) - row))
    return ids


def placeholders(request):
    """The picture and row of each placeholder of a prompt, by its position."""
    found = {}
    for span in request.media:
        at = [p for p in range(span.start, span.end) if request.prompt_ids[p] == 0]
        found |= {p: (span, row) for row, p in enumerate(at)}
    return found


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


def contents_of(request, tokens):
    """For each token, a number that stands for all that its keys and values depend on, and for the salt."""
    pictures = {p: (span.key, row) for p, (span, row) in placeholders(request).items()}
    made, before = [], request.keys[:KEY_BYTES]
    for p, token in enumerate(tokens):
        before = hash((before, token, pictures.get(p)))
        made.append(before)
    return made


class Guessing:
    """A device whose results come with guesses of up to five tokens, each of which is right with a probability."""

    def __init__(self, device, right, rng):
        self.device, self.right, self.rng = device, right, rng

    def __getattr__(self, name):
        return getattr(self.device, name)

    def run(self, batch):
        result, row = self.device.run(batch), 0
        for place, item in enumerate(batch.work):
            if isinstance(item, TokenWork) and item.sample:
                sampled, row = result.tokens[row : row + 1 + len(item.drafts)], row + 1 + len(item.drafts)
                n_right = next((i for i, (a, b) in enumerate(zip(item.drafts, sampled)) if a != b), len(item.drafts))
                result.drafts[place] = self._after([*item.seq.tokens, *sampled[: n_right + 1]])
        return result

    def _after(self, tokens):
        n = len(tokens)
        for _ in range(self.rng.randint(0, 5)):
            tokens.append(_next_token(tokens) if self.rng.random() < self.right else 3)
        return tuple(tokens[n:])


class DictTier:
    """A tier of somebody else: a dict that takes the blocks which a device evicts, and has room for `most` of them."""

    def __init__(self, device, most=10**9, name="dict"):
        self.device, self.most, self.name = device, most, name
        self.version = self.n_taken = 0
        self.blocks = {}  # by cache and key, oldest first
        self.held = Counter()

    def evicted(self, spec, keys, blocks):
        for key, block in zip(keys, blocks, strict=True):
            if (spec, key) in self.blocks:
                continue
            free = [entry for entry, mine in self.blocks.items() if not self.held[entry[0], mine]]
            if len(self.blocks) >= self.most and not free:
                continue
            if len(self.blocks) >= self.most:
                del self.blocks[free[0]]
            self.n_taken += 1
            self.blocks[spec, key] = self.n_taken
            self.device.copy(spec, self.name, self.device, DEVICE, block, self.n_taken)
            self.version += 1

    def find(self, spec, keys):
        return [self.blocks.get((spec, key)) for key in keys]

    def load_s(self, n_bytes):
        return 0.0

    def loaded(self, n_bytes, seconds):
        self.n_loaded = getattr(self, "n_loaded", 0) + n_bytes

    def hold(self, spec, blocks):
        self.held.update((spec, block) for block in blocks)

    def drop(self, spec, blocks):
        self.held.subtract((spec, block) for block in blocks)
        assert min(self.held.values(), default=0) >= 0, "dropped twice"

    def check_idle(self):
        assert not any(self.held.values()), "blocks are held though nobody reads them"


class FakeDevice:
    """Executes batches at once. `kv[(block, offset)] = (position, all up to there)`, `embed[block] = (key, part)`;
    where there are such caches, `window` is as `kv`, and `state[block] = (tokens, all of them)`. `hosted`: the same of
    the caches of other tiers, by tier and name."""

    def __init__(self, window=WINDOW):
        self.kv, self.embed, self.window, self.state = {}, {}, {}, {}
        self.window_spec = window
        self.n_encoded = {}
        self.hosted = {}
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

    def slots(self, name, tier):
        return getattr(self, name) if tier == DEVICE else self.hosted.setdefault((tier, name), {})

    def copy(self, name, tier, theirs, their_tier, source, target):
        """Block `source` of another device's cache `name` in `their_tier` becomes block `target` of this one's."""
        held, mine = theirs.slots(name, their_tier), self.slots(name, tier)
        if name in ("kv", "window"):
            mine.update({(target, i): held.get((source, i)) for i in range(4)})
        else:
            mine[target] = held.get(source)

    def _window(self, seq, start, held, drafted):
        spec = self.window_spec
        blocks, first, end = seq.hold.blocks[spec.name], seq.hold.first_block[spec.name], len(held)
        most = spec.most(1) + drafted if seq.stage is Stage.DECODE else spec.most(spec.ahead)
        assert len(blocks) <= most, "more blocks than a window needs"
        for p in range(start, end):
            self.window[(blocks[p // 4 - first], p % 4)] = (p, held[p])
        seen = range(max(0, start - spec.window + 1), end)
        read = [self.window[(blocks[p // 4 - first], p % 4)] for p in seen]
        assert read == [(p, held[p]) for p in seen], "a window onto foreign keys"

    def _state(self, item, held):
        blocks = item.seq.hold.blocks[STATE.name]
        most = STATE.with_drafts(len(item.drafts)) if item.drafts else STATE.most(1)
        assert len(blocks) <= (most if item.seq.stage is Stage.DECODE else STATE.most(2)), "more states than it needs"
        source, written = STATE.scan(blocks, item.start, item.count, bool(item.drafts))
        if item.start:
            assert self.state[source] == (item.start, held[item.start - 1]), "the sum of other tokens"
        for n_tokens, block in written:
            self.state[block] = (n_tokens, held[n_tokens - 1])

    def _encode(self, item):
        span = item.seq.request.media[item.index]
        self.n_encoded[span.key] = self.n_encoded.get(span.key, 0) + 1
        for part, block in enumerate(EMBED.held(item.seq, EMBED.pictures(item.seq.request)[item.index])):
            self.embed[block] = (span.key, part)

    def _tokens(self, item, result):
        seq, blocks = item.seq, item.seq.hold.blocks["kv"]
        if item.unknown:
            assert seq.cancelled, "goes on though what it goes on with failed"
            result.tokens.append(0)
            return
        assert item.start == seq.n_computed
        end = item.start + item.count
        shown = {id(span) for p, (span, _) in placeholders(seq.request).items() if item.start <= p < end}
        for span, picture in zip(seq.request.media, EMBED.pictures(seq.request)):
            if id(span) in shown:
                held = [self.embed[block] for block in EMBED.held(seq, picture)]
                assert held == [(span.key, part) for part in range(len(picture))], "prefill read a foreign embedding"
        tokens = [*seq.tokens, *item.drafts][:end]
        held = contents_of(seq.request, tokens)
        for p in range(item.start, end):
            self.kv[(blocks[p // 4], p % 4)] = (p, held[p])
        read = [self.kv[(blocks[p // 4], p % 4)] for p in range(end)]
        assert read == list(enumerate(held)), "attention read foreign keys"
        if WINDOW.name in seq.hold.blocks:
            self._window(seq, item.start, held, bool(item.drafts))
        if STATE.name in seq.hold.blocks:
            self._state(item, held)
        if item.sample:
            assert end == len(seq.tokens) + len(item.drafts)
            result.tokens += [_next_token(tokens[:n]) for n in range(len(seq.tokens), end + 1)]
