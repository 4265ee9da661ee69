"""Fitting a drafter to a target: bundle, data, training, checks, result (docs/fit.md).

Every stage leaves its result in the output directory and is skipped when it is there:

    settings.json           what the run was asked for; another request needs another directory
    bundle/                 the target's graphs with the drafter as it is now
    data/                   sampled texts, features, next-token distributions
    checkpoint.safetensors  weights, optimiser, step
    drafter/                the result, a DeepSpec checkpoint, and draft_vocab.json for exports
    fit.json                figures of the run
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..export.bundle import export_bundle
from ..export.checkpoints import TargetCheckpoint, read_draft, read_target
from ..export.draft_vocab import write_draft_vocab
from ..graphs.contract import DraftContract, MarkovType, to_dict
from ..graphs.errors import DraftgraphError
from ..runtime import Bundle, Engine, Output, SamplingParams, load_bundle
from ..runtime.jsonfile import read_json, write_json
from ..runtime.tokenizer import Tokenizer
from .fit import data as fit_data
from .fit.bigram import fit_bigram
from .fit.confidence import refit
from .fit.data import Dataset, SamplingPlan
from .fit.drafter import (
    as_checkpoint,
    embedding_and_head,
    new_contract,
    new_weights,
    put_drafter,
    save_drafter,
)
from .fit.loss import LossWeights
from .fit.model import Drafter
from .fit.train import HeldOut, Recipe, Trainer, Vocabulary, bf16_is_faster
from .prompts import PromptSet, read_prompts

Report = Callable[[str], None]

SETTINGS, CHECKPOINT, RESULT = "settings.json", "checkpoint.safetensors", "fit.json"
BUNDLE, DATA, DRAFTER = "bundle", "data", "drafter"
DRAFT_VOCAB = 16384  # tokens that draft_vocab.json lists


@dataclass(frozen=True)
class Shape:
    """What a new drafter looks like; with `--init` or `--bundle` it is theirs."""

    block_size: int = 7
    layers: int = 2
    intermediate_size: int | None = None  # None: the target's
    taps: tuple[int, ...] | None = None  # None: five layers, evenly spaced
    mask_token_id: int | None = None  # None: an unused special token
    markov: MarkovType = "vanilla"  # "none": DFlash
    markov_rank: int = 64
    confidence: bool = True


@dataclass(frozen=True)
class DataOptions:
    """What is sampled. tokens: generated ones. self_written: share of prompts whose user turn the
    target writes itself. cache_gib: features beyond this are recomputed instead of kept."""

    tokens: int = 120_000
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.8, 1.0)
    self_written: float = 0.12
    held_out: float = 0.06
    chat: bool | None = None  # None: when there is a chat template
    requests: int = 16
    cache_gib: float = 8.0


@dataclass(frozen=True)
class TrainOptions:
    """How it is trained. anchors: drafted blocks in all; short_slots: slots of the blocks in the
    first short_share of them, 0 for γ; precision: auto, fp32 or bf16."""

    anchors: int = 400_000
    sequences_per_step: int = 4
    anchors_per_sequence: int = 64
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.01
    vocab: int = 4096
    sampled: int = 1024
    short_slots: int = 0
    short_share: float = 0.75
    precision: str = "auto"
    loss: LossWeights = field(default_factory=LossWeights)
    checkpoints: int = 8


@dataclass(frozen=True)
class FitOptions:
    """One run. `init`: a drafter to go on from; `bundle`: a bundle of the target whose target graph
    is to be used (a quantised one, say); `samples`: texts this target sampled earlier (.npz)."""

    target: str
    out: Path
    prompts: tuple[Path, ...]
    shape: Shape = Shape()
    data: DataOptions = DataOptions()
    train: TrainOptions = TrainOptions()
    init: Path | None = None
    bundle: Path | None = None
    samples: tuple[Path, ...] = ()
    data_dir: Path | None = None
    seed: int = 0
    limit: int | None = None
    max_seq_len: int | None = None
    with_embeddings: bool = False
    threads: int | None = None


def fit(options: FitOptions, report: Report = lambda message: None) -> dict[str, Any]:
    """Run every stage that is not done yet; returns what fit.json holds. Raises `DraftgraphError`.

    Interrupted anywhere, the same call goes on where it was.
    """
    check_options(options)
    sets = [read_prompts(file, options.limit) for file in options.prompts]
    report(f"reading target {options.target}")
    target = read_target(options.target)
    _claim(options, target)
    contract, weights = _drafter(options, target)
    bundle = _bundle(options, target, contract, weights, report)
    dataset = _data(options, target, bundle, sets, report)
    _sanity(dataset, bundle, contract, report)

    torch.set_num_threads(options.threads or torch.get_num_threads())
    embed, head = embedding_and_head(target)
    recipe = _recipe(options)
    vocabulary = Vocabulary(dataset, contract.vocab_size, recipe.vocab, recipe.sampled, recipe.seed)
    report(
        f"training softmax over {vocabulary.own} of {contract.vocab_size} tokens (the most "
        f"frequent hold {vocabulary.coverage:.1%} of the held-out mass) and {vocabulary.sampled} "
        "drawn for the rest"
    )
    trainer = Trainer(Drafter(contract, weights, embed), head, dataset, vocabulary, recipe)
    run = _digest(options, dataset, contract)
    checkpoint = options.out / CHECKPOINT
    if checkpoint.is_file():
        trainer.load(checkpoint, run)
        report(f"going on from step {trainer.step} of {recipe.steps}")
    probe = Probe(bundle, target, dataset, options.threads)
    if not trainer.history:
        _measure(trainer, probe, 0.0, report)
        if options.init is None:
            fit_bigram(contract, trainer.drafter.weights, dataset, vocabulary, options.seed, report)
        trainer.save(checkpoint, run)
    _train(trainer, checkpoint, run, probe, options, report)
    return _finish(options, target, trainer, dataset, report)


def check_options(options: FitOptions) -> None:
    """Ranges of everything a user can set."""
    s, d, t = options.shape, options.data, options.train

    def check(name: str, ok: bool, value: Any, expected: str) -> None:
        if not ok:
            raise DraftgraphError(f"{name} is {value!r}, expected {expected}")

    check("--block-size", 1 <= s.block_size <= 64, s.block_size, "1 to 64")
    check("--layers", s.layers >= 1, s.layers, "at least 1")
    check("--markov", s.markov in ("none", "vanilla", "gated", "rnn"), s.markov, "a head type")
    check("--markov-rank", s.markov_rank >= 1, s.markov_rank, "at least 1 (--markov none: no head)")
    check("--tokens", d.tokens >= 1 or bool(options.samples), d.tokens, "at least 1")
    check(
        "--max-new-tokens",
        d.max_new_tokens >= fit_data.SHORTEST,
        d.max_new_tokens,
        f"at least {fit_data.SHORTEST}",
    )
    check(
        "--temperatures",
        bool(d.temperatures) and all(0 <= x <= 5 for x in d.temperatures),
        d.temperatures,
        "numbers from 0 to 5",
    )
    check("--self-written", 0 <= d.self_written <= 1, d.self_written, "a share from 0 to 1")
    check("--held-out", 0 < d.held_out < 1, d.held_out, "a share between 0 and 1")
    check("--requests", d.requests >= 1, d.requests, "at least 1")
    check("--anchors", t.anchors >= 1, t.anchors, "at least 1")
    check("--precision", t.precision in ("auto", "fp32", "bf16"), t.precision, "auto, fp32 or bf16")
    check("--lr", 0 < t.learning_rate < 1, t.learning_rate, "between 0 and 1")
    check("--vocab", t.vocab >= 0, t.vocab, "a number of tokens, 0 for all")
    check("--short-slots", 0 <= t.short_slots <= 64, t.short_slots, "0 to 64")
    check("--short-share", 0 <= t.short_share <= 1, t.short_share, "a share from 0 to 1")
    check("--checkpoints", t.checkpoints >= 1, t.checkpoints, "at least 1")
    if options.bundle is not None and options.init is not None:
        return
    if not options.prompts and not options.samples and options.data_dir is None:
        raise DraftgraphError("give prompts (--prompts), or texts of an earlier run (--data)")


# Stages


def _claim(options: FitOptions, target: TargetCheckpoint) -> None:
    """The output directory belongs to one request; another one is refused by difference."""
    wanted = json.loads(json.dumps(_settings(options, target), default=str))
    file = options.out / SETTINGS
    if not file.is_file():
        if options.out.is_dir() and any(options.out.iterdir()):
            raise DraftgraphError(
                f"{options.out}: not empty and not from `draftgraph fit`; choose another directory"
            )
        write_json(file, wanted)
        return
    found = read_json(file, "settings file of a fit")
    different = sorted(k for k in {*wanted, *found} if wanted.get(k) != found.get(k))
    if different:
        changes = "; ".join(
            f"{k}: {found.get(k)!r} before, {wanted.get(k)!r} now" for k in different
        )
        raise DraftgraphError(
            f"{options.out}: begun with other settings ({changes}); repeat them to go on, or "
            "choose another --out (with --data and --init to build on this one)"
        )


def _settings(options: FitOptions, target: TargetCheckpoint) -> dict[str, Any]:
    """Flat, so that a difference can be named."""
    values: dict[str, Any] = {"target": target.provenance}
    for part in ("shape", "data", "train"):
        values |= {f"{part}.{k}": v for k, v in asdict(getattr(options, part)).items()}
    for name in ("prompts", "samples"):
        values[name] = [
            {"file": f.name, "sha256": hashlib.sha256(_read(f)).hexdigest()}
            for f in getattr(options, name)
        ]
    for name in ("init", "bundle", "data_dir", "seed", "limit", "max_seq_len"):
        values[name] = getattr(options, name)
    for name in ("data.requests", "train.checkpoints"):  # no matter of the result
        del values[name]
    return values


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DraftgraphError(f"{file}: cannot be read ({error.strerror})") from None


def _drafter(
    options: FitOptions, target: TargetCheckpoint
) -> tuple[DraftContract, dict[str, torch.Tensor]]:
    """Shape and first weights: of the given drafter, or new ones."""
    if options.init is not None:
        return shared_drafter(options.init, target)
    if options.bundle is not None:
        contract = load_bundle(options.bundle, verify=False).draft
        contract = replace(contract, draft_vocab_size=None)  # a matter of the bundle
    else:
        s = options.shape
        mask = s.mask_token_id if s.mask_token_id is not None else unused_token(target)
        if not 0 <= mask < target.contract.vocab_size:
            raise DraftgraphError(
                f"--mask-id is {mask}, expected an id below {target.contract.vocab_size}"
            )
        last = target.contract.decoder.num_layers - 2
        if s.taps is not None and (
            not s.taps or sorted(set(s.taps)) != list(s.taps) or s.taps[0] < -1 or s.taps[-1] > last
        ):
            raise DraftgraphError(
                f"--taps is {list(s.taps)}, expected increasing layer numbers from -1 (the "
                f"embedding) to {last} (the last layer but one)"
            )
        contract = new_contract(
            target.contract,
            block_size=s.block_size,
            layers=s.layers,
            intermediate_size=s.intermediate_size,
            taps=s.taps,
            mask_token_id=mask,
            markov_type=s.markov,
            markov_rank=s.markov_rank,
            confidence=s.confidence,
        )
    return contract, new_weights(contract, options.seed)


def shared_drafter(
    path: Path, target: TargetCheckpoint
) -> tuple[DraftContract, dict[str, torch.Tensor]]:
    """A drafter that shares the target's embedding and head, its weights in float32."""
    checkpoint = read_draft(path, target)
    c = checkpoint.contract
    if not (c.shares_embedding and c.shares_head):
        raise DraftgraphError(
            f"{path}: this drafter has its own embedding or head; only drafters that share the "
            "target's can be fitted"
        )
    weights = {n: checkpoint.weights[n] for n in checkpoint.weights.names()}
    return c, {n: torch.from_numpy(w.astype("float32")) for n, w in weights.items()}


def unused_token(target: TargetCheckpoint) -> int:
    """A row of the embedding that no text uses, to stand for slots yet to be filled: a special
    token that neither stops, nor starts a text, nor stands in the chat template; without a
    tokenizer the last id."""
    files, vocab = target.tokenizer_files, target.contract.vocab_size
    if "tokenizer.json" not in files:
        return vocab - 1
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    template = files.get("chat_template.jinja", b"").decode() + str(config.get("chat_template"))
    taken = {*target.contract.stop_ids, target.contract.bos_id}
    added = json.loads(files["tokenizer.json"]).get("added_tokens", [])
    for token in sorted(added, key=lambda t: t["id"]):
        free = token["id"] < vocab and token["id"] not in taken
        if free and token.get("special") and token["content"] not in template:
            return int(token["id"])
    raise DraftgraphError(
        "the tokenizer has no special token to spare for the mask; name an id that no text uses "
        "with --mask-id"
    )


def _bundle(
    options: FitOptions,
    target: TargetCheckpoint,
    contract: DraftContract,
    weights: dict[str, torch.Tensor],
    report: Report,
) -> Bundle:
    """The working bundle: the target's graphs, for data and for measuring, and the drafter's."""
    path = options.out / BUNDLE
    if path.is_dir():
        try:
            return load_bundle(path)
        except DraftgraphError:  # interrupted while the drafter was put in
            report(f"{path} is damaged; making it again")
            shutil.rmtree(path)
    if options.bundle is not None:
        given = load_bundle(options.bundle)
        if given.target != target.contract or given.draft.tap_ids != contract.tap_ids:
            raise DraftgraphError(
                f"{options.bundle}: made for another target, or with other taps than "
                f"{list(contract.tap_ids)}; export it from {options.target} with this drafter"
            )
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(options.bundle, partial)
        partial.rename(path)
        return load_bundle(path, verify=False)
    report("exporting the target with the untrained drafter")
    export_bundle(
        target,
        as_checkpoint(contract, weights),
        path,
        max_seq_len=options.max_seq_len,
        report=report,
    )
    return load_bundle(path, verify=False)


def _data(
    options: FitOptions,
    target: TargetCheckpoint,
    bundle: Bundle,
    sets: Sequence[PromptSet],
    report: Report,
) -> Dataset:
    d = options.data
    folder = options.data_dir or options.out / DATA
    provenance = {"target": target.provenance, "taps": list(bundle.draft.tap_ids)}
    source = folder / "source.json"
    if source.is_file() and read_json(source, "source file") != provenance:
        raise DraftgraphError(
            f"{folder}: sampled from another target or with other taps; give the same, or leave "
            "--data out"
        )
    write_json(source, provenance)
    spec = bundle.target.decoder
    per_token = 2 * len(bundle.draft.tap_ids) * spec.hidden_size
    stored = sum(r.length for r in fit_data.records(folder))
    estimate = stored + 2 * d.tokens  # prompts are about as long as answers
    keep = estimate * per_token <= d.cache_gib * 2**30
    report(
        f"features: about {estimate} tokens of {per_token} bytes, "
        + ("kept on disk" if keep else f"recomputed (more than {d.cache_gib:g} GiB)")
    )
    done = sum(r.length - r.prompt_length for r in fit_data.records(folder) if r.number >= 0)
    if options.samples or (sets and done < d.tokens):
        engine = fit_data.open_engine(bundle, d.requests, features=keep, threads=options.threads)
        backend = engine.backend
        assert isinstance(backend, fit_data.RecordingBackend)
        for file in options.samples:
            fit_data.import_samples(backend, file, folder, d.held_out, report)
        if sets and done < d.tokens:
            chat = engine.tokenizer.has_chat_template if d.chat is None else d.chat
            plan = SamplingPlan(d.tokens, d.max_new_tokens, d.temperatures, options.seed)
            written = _user_turns(engine, options, sets, chat, folder, report)
            prompts = fit_data.prepare_prompts(
                engine,
                sets,
                written,
                chat=chat,
                share=d.held_out,
                room=d.max_new_tokens,
                seed=options.seed,
                report=report,
            )
            fit_data.sample(engine, prompts, plan, folder, report)
    if keep:
        return Dataset(folder)
    features = fit_data.RecordingBackend(bundle, features=True, threads=options.threads)
    return Dataset(folder, lambda ids: fit_data.run_target(features, ids, None)[0])


def _user_turns(
    engine: Engine,
    options: FitOptions,
    sets: Sequence[PromptSet],
    chat: bool,
    folder: Path,
    report: Report,
) -> list[str]:
    """The user turns that the target writes itself, kept in a file of the data folder."""
    d = options.data
    file = folder / "user-turns.json"
    if file.is_file():
        return list(read_json(file, "file of user turns")["turns"])
    if not d.self_written or not chat:
        return []
    sequences = d.tokens / (0.75 * d.max_new_tokens)  # answers often end before the limit
    count = max(1, round(d.self_written * sequences))
    turns = fit_data.write_user_turns(
        engine, count, temperature=1.0, seed=options.seed, report=report
    )
    write_json(file, {"turns": turns})
    return turns


def _sanity(dataset: Dataset, bundle: Bundle, contract: DraftContract, report: Report) -> None:
    """Show what the data looks like, and refuse what nothing can be learnt from."""
    for line in dataset.checks.lines():
        report(line)
    dataset.checks.verify()
    tokenizer = Tokenizer(bundle)
    shown: set[float] = set()
    for index in range(len(dataset)):
        record = dataset.record(index)
        if record.temperature in shown or len(shown) == 3:
            continue
        shown.add(record.temperature)
        answer = dataset.tokens(index)[record.prompt_length :][:60].tolist()
        text = tokenizer.decode(answer) if tokenizer.available else str(answer)
        report(f"sample at temperature {record.temperature:g} ({record.source}): {text!r}")
    masks = sum(
        int((dataset.tokens(i) == contract.mask_token_id).sum()) for i in range(len(dataset))
    )
    if masks:
        report(
            f"the mask id {contract.mask_token_id} occurs {masks} times in the data; a token that "
            "no text uses would be better (--mask-id)"
        )


def _recipe(options: FitOptions) -> Recipe:
    t = options.train
    bf16 = t.precision == "bf16" or (t.precision == "auto" and bf16_is_faster())
    return Recipe(
        steps=max(1, round(t.anchors / (t.sequences_per_step * t.anchors_per_sequence))),
        sequences=t.sequences_per_step,
        anchors=t.anchors_per_sequence,
        learning_rate=t.learning_rate,
        weight_decay=t.weight_decay,
        loss=t.loss,
        vocab=t.vocab,
        sampled=t.sampled,
        short_slots=t.short_slots,
        short_share=t.short_share,
        bf16=bf16,
        seed=options.seed,
    )


def _digest(options: FitOptions, dataset: Dataset, contract: DraftContract) -> str:
    """Names what a checkpoint depends on."""
    train = {k: v for k, v in asdict(options.train).items() if k != "checkpoints"}
    return digest(train, options.seed, to_dict(contract), texts_digest(dataset))


def texts_digest(dataset: Dataset) -> str:
    texts = hashlib.sha256()
    for index in range(len(dataset)):
        texts.update(dataset.tokens(index).numpy().tobytes())
    return texts.hexdigest()


def digest(*parts: Any) -> str:
    """Of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# Training


class Probe:
    """Measures a drafter in the runtime's own loop, on prompts of the held-out split."""

    def __init__(
        self, bundle: Bundle, target: TargetCheckpoint, data: Dataset, threads: int | None
    ) -> None:
        self.bundle, self.target, self.threads = bundle, target, threads
        prompts: dict[tuple[int, ...], str] = {}
        for index in data.split(held_out=True):
            record = data.record(index)
            ids = tuple(data.tokens(index)[: record.prompt_length].tolist())
            prompts[ids] = record.source
        by_source: dict[str, list[tuple[int, ...]]] = {}
        for ids, source in prompts.items():
            by_source.setdefault(source, []).append(ids)
        # One of each source in turn, so that few prompts show all of them.
        self.prompts = [
            group[i]
            for i in range(max(len(g) for g in by_source.values()))
            for group in by_source.values()
            if i < len(group)
        ]

    def put(self, contract: DraftContract, weights: dict[str, torch.Tensor]) -> None:
        put_drafter(self.bundle, self.target, as_checkpoint(contract, weights))

    def measure(self, prompts: int, tokens: int) -> dict[str, Any]:
        """Acceptance under full verification, greedy and at temperature 1."""
        engine = Engine.load(
            self.bundle.path, verify=False, threads=self.threads, max_requests=prompts
        )
        chosen = self.prompts[:prompts]
        room = self.bundle.max_seq_len - max(len(p) for p in chosen)
        figures: dict[str, Any] = {"prompts": len(chosen)}
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                temperature=temperature, max_new_tokens=min(tokens, room), seed=1
            )
            outputs = engine.generate_batch(chosen, params)
            figures[f"t{temperature:g}"] = acceptance(outputs, engine.gamma)
        return figures


def acceptance(outputs: Sequence[Output], gamma: int) -> dict[str, Any]:
    """τ (tokens committed per round) and how often at least k drafted tokens were accepted, over
    fully verified rounds that no stop id cut short."""
    accepted = [
        r.accepted
        for o in outputs
        for r in o.rounds
        if r.verified == gamma and r.next_id is not None
    ]
    if not accepted:
        return {"rounds": 0, "tau": None, "survival": []}
    count = len(accepted)
    return {
        "rounds": count,
        "tau": 1 + sum(accepted) / count,
        "survival": [sum(a >= k for a in accepted) / count for k in range(1, gamma + 1)],
    }


def _train(
    trainer: Trainer,
    checkpoint: Path,
    run: str,
    probe: Probe,
    options: FitOptions,
    report: Report,
) -> None:
    recipe = trainer.recipe
    every = -(-recipe.steps // options.train.checkpoints)
    anchors = 0
    start = told = saved = time.perf_counter()
    loss = 0.0
    while trainer.step < recipe.steps:
        terms = trainer.train_step()
        anchors += len(terms.acceptance)
        loss = terms.loss.item() if not loss else 0.9 * loss + 0.1 * terms.loss.item()
        now = time.perf_counter()
        if trainer.step % every == 0 or trainer.step == recipe.steps:
            _measure(trainer, probe, loss, report)
            trainer.save(checkpoint, run)
            start += time.perf_counter() - now  # not time spent training
            told = saved = time.perf_counter()
        elif now - saved > 120:
            trainer.save(checkpoint, run)
            saved = now
        elif now - told > 20:
            told = now
            rate = anchors / (now - start)
            left = (recipe.steps - trainer.step) * anchors / max(1, trainer.step) / rate
            report(
                f"step {trainer.step} of {recipe.steps}: loss {loss:.3f}, {rate:.0f} anchors a "
                f"second, about {left / 60:.0f} minutes left"
            )


def _measure(trainer: Trainer, probe: Probe, loss: float, report: Report) -> None:
    """Held-out figures and acceptance in the real loop, into the history."""
    held_out = trainer.evaluate()
    probe.put(trainer.drafter.contract, trainer.drafter.weights)
    real = probe.measure(8, 64)
    trainer.history.append(
        {"step": trainer.step, "loss": loss, "held_out": asdict(held_out), "runtime": real}
    )
    report(checkpoint_line(trainer.step, trainer.recipe.steps, loss, held_out, real))


def checkpoint_line(
    step: int, steps: int, loss: float, held_out: HeldOut, real: dict[str, Any]
) -> str:
    """One line that says how good the drafter is, and whether practice agrees with theory."""
    positions = " ".join(f"{a:.2f}".lstrip("0") for a in held_out.acceptance)
    taus = {t: real[t]["tau"] for t in ("t0", "t1")}
    measured = ", ".join(
        f"{tau:.2f} at T={t[1:]}" if tau else f"- at T={t[1:]}" for t, tau in taus.items()
    )
    line = (
        f"step {step} of {steps}: loss {loss:.3f}, held-out expected accepted length "
        f"{held_out.expected:.3f} (by position {positions}), real τ {measured}"
    )
    if taus["t1"] and held_out.expected > 0.5 and taus["t1"] - 1 < 0.4 * held_out.expected:
        line += "; the real loop accepts far less than expected: look at the samples"
    return line


def _finish(
    options: FitOptions,
    target: TargetCheckpoint,
    trainer: Trainer,
    dataset: Dataset,
    report: Report,
) -> dict[str, Any]:
    """Save the drafter, put it into the bundle as it was saved, and measure it once more."""
    folder = options.out / DRAFTER
    weights: Mapping[str, torch.Tensor] = trainer.drafter.weights
    head = refit(trainer)
    if head is not None:
        report(
            f"confidence on held-out texts: cross entropy {head.before:.3f}, fitted to them "
            f"{head.after:.3f}"
        )
        weights = head.into(weights)
    report(f"saving {folder}")
    save_drafter(
        folder,
        trainer.drafter.contract,
        weights,
        target,
        anchors=trainer.recipe.anchors,
        with_embeddings=options.with_embeddings,
    )
    write_draft_vocab(folder, trainer.vocabulary.ranked(DRAFT_VOCAB))
    saved = read_draft(folder, target)
    path = options.out / BUNDLE
    if options.bundle is not None:
        put_drafter(load_bundle(path, verify=False), target, saved)
    else:
        export_bundle(
            target, saved, path, max_seq_len=options.max_seq_len, overwrite=True, report=report
        )
    probe = Probe(load_bundle(path, verify=False), target, dataset, options.threads)
    checks = dataset.checks
    result = {
        "schema_version": 1,
        "settings": read_json(options.out / SETTINGS, "settings file of a fit"),
        "data": {
            "sequences": checks.sequences,
            "sampled_tokens": checks.tokens,
            "held_out_sequences": len(dataset.split(held_out=True)),
            "left_out": dict(checks.dropped),
        },
        "vocabulary": {
            "own": trainer.vocabulary.own,
            "sampled": trainer.vocabulary.sampled,
            "coverage": trainer.vocabulary.coverage,
        },
        "confidence": None if head is None else {"before": head.before, "after": head.after},
        "precision": "bf16" if trainer.recipe.bf16 else "fp32",
        "history": trainer.history,
        "runtime": probe.measure(16, 96),
        "versions": {"torch": torch.__version__},
    }
    write_json(options.out / RESULT, result)
    report(f"wrote {folder} and {path}")
    return result
