"""Each scorer against a brute-force computation from the keys; the layout of its bytes; what each is guaranteed to
be."""

import pytest
import torch

from oasiskv.core.scorers import SCORERS, TwoBitScorer, decode, encode, make_scorer

HEADS, DIM, PAGES, PARTS, QUERIES, TOKENS = 2, 32, 7, 2, 3, 16
SCALE = DIM**-0.5
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@pytest.fixture
def keys() -> torch.Tensor:
    """[pages, tokens, heads, dim], with a few channels much larger than the rest, as in real keys."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(PAGES, PARTS * TOKENS, HEADS, DIM, generator=generator)
    keys[..., ::13] *= 6
    return keys


@pytest.fixture
def queries() -> torch.Tensor:
    return torch.randn(HEADS, QUERIES, DIM, generator=torch.Generator().manual_seed(2)) * 2


def page_summaries(scorer, keys):
    """[heads, pages, bytes], as the engine gathers them."""
    return scorer.summarise(keys).transpose(0, 1).contiguous()


def score(name, dtype, keys, queries):
    scorer = make_scorer(name, DIM, dtype)
    return scorer.score(queries, page_summaries(scorer, keys), SCALE)


def true_mass(keys, queries):
    logits = torch.einsum("hqd,pthd->hqpt", queries, keys) * SCALE
    return logits.logsumexp(-1)


def brute_force(keys, queries, part_estimate):
    """logsumexp over parts of ``part_estimate(query, keys of the part) * scale``, one number at a time."""
    out = torch.empty(HEADS, QUERIES, PAGES)
    for h in range(HEADS):
        for q in range(QUERIES):
            for page in range(PAGES):
                parts = [part_estimate(queries[h, q], part[:, h]) * SCALE for part in keys[page].split(TOKENS)]
                out[h, q, page] = torch.stack(parts).logsumexp(0)
    return out


def box_estimate(share):
    def estimate(query, part):
        low, high = part.min(0).values, part.max(0).values
        return query @ ((low + high) / 2) + share * query.abs() @ ((high - low) / 2)

    return estimate


def quest_bound(query, part):
    return torch.maximum(query * part.min(0).values, query * part.max(0).values).sum()


@pytest.mark.parametrize(
    ("name", "estimate"),
    [("box", box_estimate(0.5)), ("minmax", quest_bound), ("mean", lambda query, part: query @ part.mean(0))],
)
def test_linear_scorers_are_what_they_say(name, estimate, keys, queries):
    torch.testing.assert_close(score(name, torch.float32, keys, queries), brute_force(keys, queries, estimate))


def test_oracle_is_the_exact_mass(keys, queries):
    torch.testing.assert_close(score("oracle", torch.float32, keys, queries), true_mass(keys, queries))


def test_minmax_is_an_upper_bound_of_every_tokens_logit(keys, queries):
    logits = torch.einsum("hqd,pthd->hqpt", queries, keys) * SCALE
    largest = logits.amax(3)
    assert (score("minmax", torch.float32, keys, queries) >= largest - 1e-4).all()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_q2_reads_keys_back_within_half_a_step(keys, parts):
    """A step is a third of what the part spans, and its bounds are right to half a 255th of what the page spans."""
    keys = keys[:4].reshape(-1, parts * TOKENS, HEADS, DIM)
    scorer = TwoBitScorer(DIM, torch.float32)
    summaries = scorer.summarise(keys)
    assert summaries.shape[2] == scorer.page_bytes(parts)
    error = (scorer.keys(summaries) - keys.transpose(1, 2)).abs().unflatten(2, (parts, TOKENS)).amax(3)
    of_parts = keys.unflatten(1, (parts, TOKENS))
    step = (of_parts.amax(2) - of_parts.amin(2)).transpose(1, 2) / 3  # [pages, heads, parts, dim]
    level = (keys.amax(1) - keys.amin(1)).unsqueeze(2) / 255
    assert (error <= step / 2 + (0 if parts == 1 else level) + 1e-5).all()


def test_q2s_outline_is_the_box_of_the_page(keys, queries):
    scorer = TwoBitScorer(DIM, torch.float32)
    outlines = page_summaries(scorer, keys)[..., : scorer.outline_bytes]
    box = torch.stack((keys.amax(1) + keys.amin(1), keys.amax(1) - keys.amin(1)), 2) / 2  # [pages, heads, 2, dim]
    assert torch.equal(outlines.view(torch.float32), box.flatten(2).transpose(0, 1))
    by_hand = torch.einsum("hqd,phd->hqp", queries, box[:, :, 0])
    by_hand += 0.5 * torch.einsum("hqd,phd->hqp", queries.abs(), box[:, :, 1])
    torch.testing.assert_close(scorer.coarse.score(queries, outlines, SCALE), by_hand * SCALE)


def test_q2_packs_a_tokens_channels_in_a_word():
    keys = torch.zeros(1, TOKENS, 1, 4)
    keys[0, :, 0, 1] = torch.arange(TOKENS) % 4  # codes are the values themselves: 0 .. 3
    scorer = TwoBitScorer(4, torch.float32)
    packed = scorer.summarise(keys)[0, 0, scorer.outline_bytes :]
    assert (packed.view(torch.int32) >> 2).tolist() == [token % 4 for token in range(TOKENS)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_q2_is_closer_to_the_oracle_than_the_cheap_scorers(dtype, keys, queries):
    truth = true_mass(keys, queries)
    truth = truth - truth.mean(-1, keepdim=True)

    def spread(name):
        found = score(name, dtype, keys, queries)
        return (found - found.mean(-1, keepdim=True) - truth).abs().mean()

    assert spread("q2") < 0.7 * min(spread("box"), spread("minmax"), spread("mean"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", ["box", "minmax", "mean", "q2", "oracle"])
def test_small_formats_stay_close_to_float32(name, dtype, keys, queries):
    exact, rough = score(name, torch.float32, keys, queries), score(name, dtype, keys, queries)
    assert rough.dtype == torch.float32
    assert (exact - rough).abs().mean() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCORERS)
def test_summaries_are_opaque_bytes_of_the_announced_size(name, dtype, keys):
    scorer = make_scorer(name, DIM, dtype)
    summary = scorer.summarise(keys.bfloat16())
    assert summary.dtype == torch.uint8 and summary.is_contiguous()
    assert summary.shape == (PAGES, HEADS, scorer.page_bytes(PARTS))
    assert all(scorer.page_bytes(parts) % 4 == 0 for parts in (1, 2, 8)) and scorer.outline_bytes % 4 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in SCORERS if name != "random"])
def test_views_into_a_larger_store_score_alike(name, dtype, keys, queries):
    """A store may hand out slices: strided, and at any multiple of 4 bytes."""
    scorer = make_scorer(name, DIM, dtype)
    plain = page_summaries(scorer, keys)
    store = torch.zeros(HEADS, PAGES + 3, plain.shape[2] + 4, dtype=torch.uint8)
    store[:, 2 : 2 + PAGES, 4:] = plain
    torch.testing.assert_close(
        scorer.score(queries, store[:, 2 : 2 + PAGES, 4:], SCALE), scorer.score(queries, plain, SCALE)
    )


def test_sizes_are_those_of_the_study():
    for parts in (1, 2):
        kv = 2 * 2 * parts * TOKENS * 64  # K and V in bfloat16
        size = {name: make_scorer(name, 64, torch.bfloat16).page_bytes(parts) / kv for name in ("box", "mean", "q2")}
        assert size == {"box": 2 / 32, "mean": 1 / 32, "q2": 4 / 32}


def test_random_is_reproducible_and_changes_from_call_to_call(keys, queries):
    first, second = (make_scorer("random", DIM, torch.float32) for _ in range(2))
    summaries = page_summaries(first, keys)
    one, two = first.score(queries, summaries, SCALE), first.score(queries, summaries, SCALE)
    assert not torch.equal(one, two)
    assert torch.equal(second.score(queries, summaries, SCALE), one)


def test_int8_holds_its_scale_before_the_numbers():
    values = torch.tensor([[-127.0, 0.0, 63.5, 127.0]]) * 0.25
    stored = encode(values, torch.int8)
    assert stored.shape == (1, 8)
    whole, scale = decode(stored, torch.int8)
    assert scale.tolist() == [0.25] and whole.float().tolist() == [[-127.0, 0.0, 64.0, 127.0]]


def test_constant_keys_are_no_special_case(queries):
    keys = torch.full((PAGES, PARTS * TOKENS, HEADS, DIM), 0.3)
    for name in SCORERS:
        for dtype in DTYPES:
            assert score(name, dtype, keys, queries).isfinite().all()


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "told"),
    [
        ("bex", 64, torch.float32, "box"),
        ("box", 63, torch.float32, "multiple of 4"),
        ("box", 64, torch.float16, "bfloat16"),
    ],
)
def test_wrong_choices_are_refused_with_what_is_allowed(name, head_dim, dtype, told):
    with pytest.raises(ValueError, match=told):
        make_scorer(name, head_dim, dtype)
