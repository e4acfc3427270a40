"""Continued pretraining and long-context extension: one stage over a mixture of code, functions and edit documents.

``init`` names the checkpoint to go on from; without it a tokenizer is trained and the model starts from nothing (how
the base that ships with Etude was made). A new ``context`` and ``rope_theta`` make it the long-context phase.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import Field
from tokenizers import Tokenizer

from etude.base.config import Config
from etude.base.telemetry import RunDirectory
from etude.data.chat import ChatCodec
from etude.data.corpus import SourceFile, default_roots, functions, source_files
from etude.data.edit_documents import edit_document
from etude.data.mixture import CodeSource, EditSource, Source, TextSource, mixture
from etude.data.packing import PackedBatch
from etude.data.tokenizer import EOS, PAD, load_tokenizer, save_tokenizer, token_id, train_tokenizer
from etude.models.checkpoint import load_checkpoint, save_checkpoint
from etude.models.config import ModelConfig
from etude.models.deepseek import DeepseekModel, initialise
from etude.training.language import StageConfig, evaluate_loss, held_out_batches, train_stage


class DataConfig(Config):
    """Where documents come from and in which proportion."""

    roots: tuple[str, ...] = ()
    """Folders with Python sources; empty means the standard library and the installed packages."""
    max_files: int = Field(2000, ge=10)
    """Files taken, in the order of a hash of their path."""
    max_file_bytes: int = 60_000
    code: float = 0.35
    """Weight of windows of whole files."""
    functions: float = 0.15
    """Weight of short functions."""
    edits: float = 0.5
    """Weight of edit documents."""
    texts: float = 0.0
    """Weight of the generated task repositories (training split)."""
    text_edits: float = 0.0
    """Weight of edit documents over the functions of those repositories."""
    edit_context_weight: float = Field(1.0, ge=0.0, le=1.0)
    """Loss weight, in edit documents, of what is shown; the edits and answers weigh 1."""


class PretrainConfig(Config):
    """A whole pretraining run."""

    seed: int = 0
    init: str = ""
    """Checkpoint directory to go on from; "" starts from nothing; "base" is the one that ships with Etude."""
    model: ModelConfig = ModelConfig()
    """Shape of the model; used only when starting from nothing."""
    context: int | None = None
    """New maximum number of positions."""
    rope_theta: float | None = None
    """New rotary base."""
    mtp_depths: int | None = None
    """New number of MTP depths; those the checkpoint lacks start from random weights."""
    data: DataConfig = DataConfig()
    stage: StageConfig = StageConfig()
    eval_every: int = Field(50, ge=1)
    eval_batches: int = Field(8, ge=1)
    save_seconds: float = 300.0
    threads: int = Field(1, ge=1)
    save_dtype: str = Field("float32", pattern="^(float32|bfloat16)$")


def pretrain(
    config: PretrainConfig,
    run: RunDirectory,
    out: Path,
    *,
    name: str,
    tools: Mapping[str, tuple[str, ...]],
    init: Path | None,
    texts: Sequence[str] = (),
    held_out_texts: Sequence[str] = (),
    allowed: Callable[[str], bool] = lambda text: True,
) -> DeepseekModel:
    """Train, log under stage ``name`` and save a Hugging Face directory at ``out``; returns the model.

    ``texts`` are generated sources for the ``texts`` share of the mixture, ``held_out_texts`` the ones to test on;
    ``allowed`` says of a text with an edited generated function whether it may be trained on.
    """
    torch.set_num_threads(config.threads)
    files = _files(config.data)
    train_files = [file for file in files if not file.held_out]
    snippets = _functions(train_files)
    if init is None:
        tokenizer = train_tokenizer(
            _tokenizer_texts(train_files, snippets, tools, config.seed), config.model.vocab_size
        )
        model = DeepseekModel(config.model)
        initialise(model, config.seed)
    else:
        tokenizer = load_tokenizer(init)
        changes = {
            "max_position_embeddings": config.context,
            "rope_theta": config.rope_theta,
            "num_nextn_predict_layers": config.mtp_depths,
        }
        model = load_checkpoint(init, **{key: value for key, value in changes.items() if value is not None})
    codec = ChatCodec(tokenizer, tools)
    stream = mixture(_sources(config, codec, train_files, snippets, texts, allowed), config.seed)
    held = _held_out(config, codec, files, held_out_texts)
    losses = {f"heldout_{key}_loss": evaluate_loss(model, batches) for key, batches in held.items()}
    run.metrics(name, 0, heldout_loss=losses["heldout_code_loss"], **losses)
    saved = time.monotonic()
    for report in train_stage(model, config.stage, stream):
        last = report.step + 1 == config.stage.steps
        losses = {}
        if (report.step + 1) % config.eval_every == 0 or last:
            losses = {f"heldout_{key}_loss": evaluate_loss(model, batches) for key, batches in held.items()}
            losses["heldout_loss"] = losses["heldout_code_loss"]
        run.metrics(
            name, report.step + 1, train_loss=report.train_loss, mtp_loss=report.mtp_loss,
            mtp_agreement=report.mtp_agreement, grad_norm=report.grad_norm, lr=report.lr, tokens=report.tokens,
            seconds=report.seconds, max_load=report.max_load, **losses,
        )  # fmt: skip
        if time.monotonic() - saved > config.save_seconds:
            save(model, tokenizer, out, config.save_dtype)
            saved = time.monotonic()
    save(model, tokenizer, out, config.save_dtype)
    return model


def save(model: DeepseekModel, tokenizer: Tokenizer, out: Path, dtype: str) -> None:
    """Write a complete Hugging Face directory."""
    eos, pad = token_id(tokenizer, EOS), token_id(tokenizer, PAD)
    save_checkpoint(model, out, eos_token_id=eos, pad_token_id=pad, dtype=getattr(torch, dtype))
    save_tokenizer(tokenizer, out)


def _files(config: DataConfig) -> list[SourceFile]:
    roots = [Path(root) for root in config.roots] or default_roots()
    return source_files(roots, max_bytes=config.max_file_bytes, max_files=config.max_files)


def _functions(files: Sequence[SourceFile]) -> list[str]:
    return [snippet for file in files for snippet in functions(file.text, max_lines=9, max_width=60)]


def _sources(
    config: PretrainConfig,
    codec: ChatCodec,
    files: Sequence[SourceFile],
    snippets: Sequence[str],
    texts: Sequence[str],
    allowed: Callable[[str], bool],
) -> list[tuple[float, Source]]:
    length = config.stage.row_length
    data = config.data
    sources: list[tuple[float, Source]] = [
        (data.code, CodeSource(files, codec, window_chars=3 * length)),
        (data.functions, TextSource(snippets, codec, per_document=3)),
        (data.edits, EditSource(snippets, codec, length, data.edit_context_weight)),
    ]
    if texts:
        generated = [snippet for text in texts for snippet in functions(text, min_lines=2)]
        generated = [snippet for snippet in generated if not snippet.startswith("def test_")]
        sources.append((data.texts, TextSource(texts, codec)))
        sources.append((data.text_edits, EditSource(generated, codec, length, data.edit_context_weight, allowed)))
    return [(weight, source) for weight, source in sources if weight > 0]


def _held_out(
    config: PretrainConfig, codec: ChatCodec, files: Sequence[SourceFile], texts: Sequence[str]
) -> dict[str, list[PackedBatch]]:
    """Fixed evaluation batches: code of files never trained on, edit documents over them, generated repositories."""
    held = [file for file in files if file.held_out]
    length = config.stage.row_length
    sources: dict[str, Source] = {"code": CodeSource(held, codec, window_chars=3 * length)}
    if config.data.edits > 0:
        sources["edits"] = EditSource(_functions(held), codec, length, config.data.edit_context_weight)
    if texts:
        sources["texts"] = TextSource(texts, codec)
    rows = min(8, config.stage.rows_per_step)
    return {
        key: held_out_batches(mixture([(1.0, source)], seed=12345), length, rows, config.eval_batches)
        for key, source in sources.items()
    }


def _tokenizer_texts(
    files: Sequence[SourceFile], snippets: Sequence[str], tools: Mapping[str, tuple[str, ...]], seed: int
) -> list[str]:
    """What the BPE is trained on: code, functions, and the words of edit documents."""
    rng = random.Random(seed)
    texts = [file.text[:3000] for file in rng.sample(list(files), min(800, len(files)))]
    chosen = rng.sample(list(snippets), min(4000, len(snippets)))
    texts += chosen
    for _ in range(6000):
        messages = edit_document([rng.choice(chosen)], rng)
        for message in messages or ():
            texts.append(message.content)
            texts += ["\n".join([call.name, *call.arguments.values()]) for call in message.calls]
    texts += list(tools) * 50
    return texts
