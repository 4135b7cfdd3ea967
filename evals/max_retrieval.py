"""Max retrieval: find the item with the largest value among n, and say its class.

Item i is [rho_i, onehot(kappa_i)] with rho_i ~ U(0, 1) and kappa_i uniform over ten classes; the
query is one scalar ~ U(0, 1); the label is the kappa of the item whose rho is the largest. Training
sees n = 5 .. 16 (one n per batch), the test goes on to thousands: what is measured is how sharply a
normalizer still finds one key among n (Velickovic et al. 2024, arXiv:2410.01104).

The data are a pure function of (seed, split, n, index): a Philox generator keyed by
(seed, split, n) whose counter stands at ``index * blocks(n)``. Neither chunks nor resumption nor
the order of workers can change an item.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import attnzoo
from evals.cells import Preset, VariantCall
from evals.metrics import Outcome, Tally, weight_metrics, weights_of
from evals.tables import Published
from evals.training import fit

NAME = "max-retrieval"
CLASSES = 10
CHANCE = 1 / CLASSES
BEST_KEYS = 16  # columns of the heat map: mean weight of the 16 keys with the largest rho
CHUNK_ITEMS = 2**15

# Part of every cell's identity: change it when the data or the model change.
_GENERATOR = "philox-1"
_SPLITS = {"train": 1, "test": 2, "train-lengths": 3}
_WORDS = 4  # uint64 words per Philox counter


@dataclass(frozen=True)
class Settings:
    """What a cell depends on besides its variant, its seed and its length."""

    steps: int = 3000
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    warmup: float = 0.3
    width: int = 128
    scale: str = "sqrt"  # "sqrt": z = q.k / sqrt(d); "none": z = q.k
    train_shortest: int = 5
    train_longest: int = 16
    sequences_to_1024: int = 2000
    sequences_above: int = 500
    dtype: str = "float32"

    @property
    def schedule(self) -> str:
        """The schedule in words: it is printed with every result."""
        return (
            f"one-cycle cosine, {self.steps} steps, peak {self.learning_rate:g}, "
            f"{self.warmup:.0%} warm-up"
        )

    @property
    def score_scale(self) -> float:
        """The ``scale`` handed to attention."""
        return self.width**-0.5 if self.scale == "sqrt" else 1.0

    def sequences(self, length: int) -> int:
        """How many test sequences of this length are evaluated."""
        return self.sequences_to_1024 if length <= 1024 else self.sequences_above

    @property
    def training_work(self) -> float:
        """Items that training takes through the network, counted three times for the backward."""
        return 3.0 * self.steps * self.batch * (self.train_shortest + self.train_longest) / 2

    def testing_work(self, length: int) -> float:
        """Items that testing takes through the network."""
        return float(self.sequences(length) * length)

    def training_identity(self) -> dict[str, object]:
        """What a training depends on (evaluation sizes do not belong to it)."""
        chosen = {k: v for k, v in asdict(self).items() if not k.startswith("sequences")}
        return {"task": NAME, "generator": _GENERATOR, "schedule": "one-cycle cosine", **chosen}

    def evaluation_identity(self, length: int) -> dict[str, object]:
        """What an evaluation depends on besides its training and its variant."""
        return {"length": length, "sequences": self.sequences(length)}


_QUICK = (
    "softmax",
    "softmax->adaptive_temperature",
    "softmax->log_n(train_length=16)",
    "ssmax",
    "sigmoid",
    "entmax",
    "asentmax",
    "cosformer(max_length=16384)",
    "taylor",
)
PRESETS = {
    "smoke": Preset(
        variants=("softmax", "softmax->adaptive_temperature", "ssmax", "entmax"),
        seeds=1,
        lengths=(16, 64, 256),
        settings=Settings(steps=300, sequences_to_1024=500),
        note="smoke: only shows that everything runs; its figures mean nothing",
    ),
    "quick": Preset(
        variants=_QUICK,
        seeds=3,
        lengths=tuple(2**i for i in range(4, 13)),
        settings=Settings(steps=2000),
        note="quick: three seeds, short training; compare variants, not published figures",
    ),
    "paper": Preset(
        variants=_QUICK,
        seeds=10,
        lengths=tuple(2**i for i in range(4, 15)),
        settings=Settings(steps=10000),
        note="paper: ten seeds, lengths to 16384; about an hour and a half on two cores",
    ),
}

# As the project quotes it; its values at 32, 128 and 8192 are second-hand.
PUBLISHED = Published(
    title="Accuracy, %, beside Table 1 of arXiv:2410.01104 (ten seeds; ? = quoted second-hand)",
    lengths=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    second_hand=(32, 128, 8192),
    rows={
        "softmax": (98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4),
        "softmax->adaptive_temperature": (
            98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0,
        ),
    },
)  # fmt: skip


# ---------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Batch:
    """Sequences of one length: rho (B, n), classes (B, n), query (B,), target (B,), label (B,)."""

    rho: Tensor
    classes: Tensor
    query: Tensor

    @property
    def target(self) -> Tensor:
        """Index of the largest rho, the first one of equals: (B,)."""
        return self.rho.argmax(dim=-1)

    @property
    def label(self) -> Tensor:
        """Class of the item with the largest rho: (B,)."""
        return self.classes.gather(1, self.target[:, None])[:, 0]

    def items(self) -> Tensor:
        """The model's input ``[rho, onehot(class)]``: (B, n, 11)."""
        one_hot = torch.zeros(*self.rho.shape, CLASSES, device=self.rho.device)
        one_hot.scatter_(2, self.classes[..., None], 1.0)
        return torch.cat((self.rho[..., None], one_hot), dim=-1)

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        return Batch(self.rho.to(device), self.classes.to(device), self.query.to(device))


def _words(seed: int, split: str, length: int, start: int, stop: int, words: int) -> np.ndarray:
    """uint64 words (stop - start, words) of the indices start .. stop - 1."""
    blocks = -(-words // _WORDS)
    key = np.array([seed, (_SPLITS[split] << 32) | length], dtype=np.uint64)
    generator = np.random.Philox(counter=start * blocks, key=key)
    raw = generator.random_raw((stop - start) * blocks * _WORDS)
    return raw.reshape(stop - start, blocks * _WORDS)[:, :words]


def sequences(seed: int, split: str, length: int, start: int, stop: int) -> Batch:
    """Sequences start .. stop - 1 of (seed, split, length).

    The first word of a sequence is its query, each further one an item: the upper 24 bits are rho
    (exact in fp32, so that the label is the argmax of what the model sees), the lower 32 the class.
    """
    raw = _words(seed, split, length, start, stop, length + 1)
    uniform = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    low = raw[:, 1:] & np.uint64(0xFFFFFFFF)
    classes = (low * np.uint64(CLASSES)) >> np.uint64(32)
    return Batch(
        rho=torch.from_numpy(np.ascontiguousarray(uniform[:, 1:])),
        classes=torch.from_numpy(classes.astype(np.int64)),
        query=torch.from_numpy(np.ascontiguousarray(uniform[:, 0])),
    )


def training_lengths(seed: int, settings: Settings) -> np.ndarray:
    """The n of each training step, uniform over train_shortest .. train_longest: (steps,)."""
    raw = _words(seed, "train-lengths", 0, 0, settings.steps, 1)[:, 0]
    choices = settings.train_longest - settings.train_shortest + 1
    picked = ((raw >> np.uint64(32)) * np.uint64(choices)) >> np.uint64(32)
    return picked.astype(np.int64) + settings.train_shortest


# --------------------------------------------------------------------------------------- model


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


class Model(nn.Module):
    """Item MLP, query MLP, one attention head with q/k/v projections, output MLP to ten logits."""

    def __init__(self, variant: VariantCall, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.scale = settings.score_scale
        self.item = _mlp(1 + CLASSES, width, width)
        self.query = _mlp(1, width, width)
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.output = _mlp(width, width, CLASSES)
        self.attention = attnzoo.nn.Attention(variant.name, 1, **variant.params)

    def project(self, items: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, 1, 1, D), k and v (B, 1, n, D) of items (B, n, 11) and query (B,)."""
        q = self.to_q(self.query(query[:, None]))
        item = self.item(items)
        return rearrange(q, "b d -> b 1 1 d"), self.to_k(item)[:, None], self.to_v(item)[:, None]

    def folded(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """`project` with W (U x + c) + b as (W U) x + (W c + b): a third of the work saved.

        The item MLP's second layer and the keys' and values' projections have nothing between them,
        so this is the same function of the same weights, with the same gradients.
        """
        hidden, second = self.item[:2], self.item[2]
        assert isinstance(second, nn.Linear)
        folds = [(to.weight @ second.weight, to(second.bias)) for to in (self.to_k, self.to_v)]

        def project(items: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q = self.to_q(self.query(query[:, None]))
            item = hidden(items)
            k, v = (F.linear(item, weight, bias)[:, None] for weight, bias in folds)
            return rearrange(q, "b d -> b 1 1 d"), k, v

        return project

    def decode(self, attended: Tensor) -> Tensor:
        """Logits (B, 10) of the attention's output (B, 1, 1, D)."""
        return self.output(attended[:, 0, 0])

    def forward(self, items: Tensor, query: Tensor) -> Tensor:
        """Logits (B, 10)."""
        return self.decode(self.attention(*self.folded()(items, query), scale=self.scale))


# ------------------------------------------------------------------------- training and testing


def train(
    variant: VariantCall,
    seed: int,
    settings: Settings,
    device: str,
    progress: Callable[[float], None],
) -> Model:
    """The trained model. The seed fixes initial values and data, the same for every variant."""
    torch.manual_seed(seed)
    model = Model(variant, settings).to(device)
    lengths = training_lengths(seed, settings)

    def loss(step: int) -> Tensor:
        first = step * settings.batch
        batch = sequences(seed, "train", int(lengths[step]), first, first + settings.batch)
        batch = batch.to(device)
        return F.cross_entropy(model(batch.items(), batch.query), batch.label)

    fit(model, loss, settings, progress)
    return model.eval()


@torch.inference_mode()
def evaluate(
    model: Model,
    tests: Mapping[str, VariantCall | None],
    seed: int,
    length: int,
    settings: Settings,
    device: str,
    progress: Callable[[float], None],
) -> dict[str, Outcome]:
    """Every metric of every variant in ``tests`` (None: the trained one) at one length.

    Logits come from attention in fp32 as it is trained; the weights that the other metrics are made
    of are computed in fp64 from the same q and k, so that a tie of fp32 is no miss of the scorer.
    A variant that the model was not trained with takes its own fixed parameters.
    """
    count = settings.sequences(length)
    chunk = max(1, CHUNK_ITEMS // length)
    runs = {
        name: (Tally(), model.attention if test is None else _fixed(test, device))
        for name, test in tests.items()
    }
    project = model.folded()
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        _evaluate_chunk(
            model, project, runs, sequences(seed, "test", length, start, stop).to(device)
        )
        progress(stop / count)
    return {name: tally.outcome() for name, (tally, _) in runs.items()}


def _fixed(test: VariantCall, device: str) -> attnzoo.nn.Attention:
    """A variant swapped in at inference: nothing of it was learned."""
    return attnzoo.nn.Attention(test.name, 1, learn=(), **test.params).to(device)


def _evaluate_chunk(
    model: Model,
    project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    runs: dict[str, tuple[Tally, attnzoo.nn.Attention]],
    batch: Batch,
) -> None:
    """One chunk of sequences for every variant; q, k and v are computed once for all of them."""
    began = time.process_time()
    try:
        q, k, v = project(batch.items(), batch.query)
        exact = q.double(), k.double()
    except (MemoryError, RuntimeError) as error:
        for tally, _ in runs.values():
            tally.fail(error)
        return
    target, label = batch.target, batch.label
    order = batch.rho.topk(min(BEST_KEYS, batch.rho.shape[1]), dim=-1).indices
    shared = (time.process_time() - began) / len(runs)
    for tally, attention in runs.values():

        def work(attention: attnzoo.nn.Attention = attention) -> tuple[dict[str, Tensor], Tensor]:
            logits = model.decode(attention(q, k, v, scale=model.scale))
            weights = weights_of(attention, *exact, model.scale)[:, 0, 0]
            found = weight_metrics(weights, target, batch.classes, label, CLASSES)
            # A NaN among the logits must not count as a wrong answer.
            right = (logits.argmax(dim=-1) == label).double()
            found["accuracy"] = right + 0 * logits.sum(dim=-1)
            return found, weights.gather(1, order)

        tally.cpu_seconds += shared
        tally.add(work)
