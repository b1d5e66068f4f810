"""Model: from a path to weights and a back end; makes sessions."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from . import _ext
from .checkpoint import Checkpoint, ModelConfig, open_checkpoint
from .checks import callback, choice, path_of, positive_int
from .engram import EngramOptions, EngramStats, open_engram, stats_of
from .errors import BackendError, MemoryPlanError, OptionError, StateError, TokenizerError, shown
from .kvstore import KVStore
from .kvstore.format import root_id
from .machine import human, physical_memory
from .memory import MemoryPlan, plan_session, refuse_what_cannot_fit, weight_bytes
from .tokenizer import Tokenizer
from .weights import build, default_activations
from .weights_id import weights_id

if TYPE_CHECKING:
    from .drafter import Drafter
    from .session import Session

NANO = Path(__file__).parent / "data" / "nano"
DEFAULT_RETAIN = 8192
DEVICES = ("metal", "cuda")
"""Back ends that are devices."""
LoadProgress = Callable[[int, int], None]
"""Called with (bytes looked at, bytes in all) while `check=True` reads the weights."""

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Model:
    """An opened model: configuration, weights, tokenizer, worker threads. Make one with `Model.open`.

    Sessions share it and may run in different threads. A context manager; close it after its sessions.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ext: _ext.Model,
        activations: str,
        weights: int,
        engram: _ext.Engram | None,
        matrix: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._ext: _ext.Model | None = ext
        self._activations = activations
        self._matrix = matrix
        self._weights = weights
        self._engram_bytes = 0 if engram is None else engram.bytes
        self._engram_memory = 0 if engram is None else (engram.bytes if engram.in_memory else engram.cache_budget)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        backend: str = "auto",
        activations: Literal["auto", "bf16", "fp8", "fp32"] = "auto",
        prefill: Literal["exact", "matrix"] = "exact",
        threads: int | None = None,
        engram: Literal["disk", "ram"] = "disk",
        engram_path: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        engram_cache: int | str | None = None,
        engram_threads: int | None = None,
        engram_direct: bool = False,
        check: bool = False,
        progress: LoadProgress | None = None,
    ) -> Self:
        """Open an official safetensors folder or a GGUF file; without a path the nano model that comes along.

        backend: "auto", "cpu" (the best instruction set of this machine) or "cpu/avx512", "cpu/avx2", "cpu/neon",
            "cpu/plain", or "metal", "cuda" where there is such a device. All give the same bits (E4).
        activations: what activations are rounded to: "bf16", "fp8" (also quantised in front of fp8 and fp4 weights,
            as the reference does), "fp32" (for finding errors), or "auto": fp8 for an official fp8 checkpoint, else
            bf16.
        prefill: "exact": prompts have the same bits as steps. "matrix": heavy products of prompts run on AVX-512-BF16,
            faster, with weights rounded to bfloat16: other bits, the same for any chunking and number of threads.
            Generated tokens are canonical in both. OptionError where the processor lacks it.
        threads: worker threads; None takes one for each core that this process may use.
        tokenizer: a tokenizer.json to use; None takes the one in the folder (or beside it), or in the GGUF file.
        engram: where the rows of the two Engram tables come from: "disk" (they stay in the file and are read by
            threads while layers compute) or "ram" (read into memory now; 203 GB for the release).
        engram_path: the tables are elsewhere, on a faster disk for example: a copy of the checkpoint's folder or file,
            or a folder with the shards that hold them; the checkpoint itself may then lack them.
        engram_cache: bytes for rows that are read often, a number or text such as "2 GiB"; None takes a 64th of the
            free memory, at most 4 GiB and an eighth of the tables; 0 has none. Neither this nor any other Engram option
            changes a result.
        engram_threads: most reads at the same time, half of them for decode steps alone; None takes up to 64.
        engram_direct: read around the system's page cache, so that rows do not push weights out of it.
        check: read all weights now and refuse NaN and infinity, naming the tensor.
        progress: called with (bytes done, bytes in all) while checking.

        Memory is planned first: MemoryPlanError says what does not fit, with numbers. Raises CheckpointError or
        ConfigError with every problem found, OptionError for an option, BackendError for a back end that is not here.
        """
        isa = _isa(backend)
        choice("activations", activations, ("auto", "bf16", "fp8", "fp32"))
        matrix = choice("prefill", prefill, ("exact", "matrix")) == "matrix"
        tables = EngramOptions.checked(engram, engram_path, engram_cache, engram_threads, engram_direct)
        if not isinstance(check, bool):
            raise OptionError(f"check: expected True or False, found {shown(check)}")
        callback("progress", progress)
        n_threads = worker_threads(threads)
        parts = ("main", "engram") if tables.path is None else ("main",)
        checkpoint = open_checkpoint(NANO if path is None else path_of("path", path), parts=parts)
        if tokenizer is not None:
            checkpoint.tokenizer, checkpoint.tokenizer_metadata = path_of("tokenizer", tokenizer), None
        weights, on_disk = weight_bytes(checkpoint)
        if weights > physical_memory():
            raise MemoryPlanError(
                f"{checkpoint.path}: the weights take {human(weights)}, this machine has {human(physical_memory())}; "
                f"a smaller recipe or a larger machine is needed (Engram tables, {human(on_disk)}, stay on disk)"
            )
        if check:
            checkpoint.check(progress)
        mode = default_activations(checkpoint.config, checkpoint.dialect) if activations == "auto" else activations
        if matrix:
            _check_matrix(isa, mode)
        rows = open_engram(checkpoint, tables, weights)
        return cls(checkpoint, build(checkpoint, mode, isa, n_threads, rows), mode, weights, rows, matrix)

    @classmethod
    def synthetic(
        cls,
        shape: Literal["released", "tiny"] = "released",
        *,
        layers: int = 40,
        experts: int = 128,
        recipe: Literal["q4", "mxfp4", "fp8fp4", "bf16"] = "q4",
        backend: str = "auto",
        activations: Literal["auto", "bf16", "fp8", "fp32"] = "auto",
        threads: int | None = None,
        engram_rows: int | None = None,
        seed: int = 1,
        progress: LoadProgress | None = None,
    ) -> Self:
        """For benchmarks only: a model of random weights that lie in no file. What it generates means nothing.

        The weights are written by the back end itself into its own memory (a kernel on a device, threads on the CPU),
        the same bytes everywhere for a seed; rows of the Engram tables are made when they are asked for, never read.

        shape: "released" has the widths of the release, "tiny" small ones.
        layers: 6 to 40; every kind of layer occurs. 40 of the released shape with 16 experts take 22 GB, with 128
            experts 112 GB (q4).
        experts: routed experts of a layer; more of them take memory, not bytes a token.
        recipe: types of the weights: "q4", "mxfp4" as the GGUF recipes, "fp8fp4", "bf16" as official folders.
        backend, activations, threads: as in `open`.
        engram_rows: about so many rows a table; None takes the release's 384 million (tiny: 100,000).
        seed: 0 to 2^64 - 1.
        progress: called with (bytes done, bytes in all).

        MemoryPlanError when it does not fit, OptionError for an option, BackendError for a back end that is not here.
        """
        from . import synthetic

        isa = _isa(backend)
        choice("activations", activations, ("auto", "bf16", "fp8", "fp32"))
        callback("progress", progress)
        layers, experts, seed = synthetic.options(layers, experts, seed)
        n_threads = worker_threads(threads)
        if engram_rows is not None:
            engram_rows = positive_int("engram_rows", engram_rows, 1, 1 << 40)
        config = synthetic.config_of(shape, layers, experts, recipe, engram_rows)
        name = f"synthetic {shape}, {layers} layers, {experts} experts, {recipe}, seed {seed}"
        place = isa if isa in DEVICES else "cpu"
        checkpoint = synthetic.make(config, recipe, seed, place, n_threads, name, progress)
        weights, _ = weight_bytes(checkpoint)
        mode = default_activations(config, checkpoint.dialect) if activations == "auto" else activations
        rows = synthetic.engram(config, seed)
        return cls(checkpoint, build(checkpoint, mode, isa, n_threads, rows), mode, weights, rows)

    # ---- what it is --------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Where it was opened from."""
        return self._checkpoint.path

    @property
    def config(self) -> ModelConfig:
        """The checked configuration."""
        return self._checkpoint.config

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors and where they are."""
        return self._checkpoint

    @property
    def activations(self) -> str:
        """What activations are rounded to: bf16, fp8 or fp32."""
        return self._activations

    @property
    def backend(self) -> str:
        """Back end and instruction set, such as cpu/avx512."""
        return self._handle().isa

    @property
    def threads(self) -> int:
        """Worker threads, the calling one included."""
        return int(self._handle().threads)

    @property
    def engram(self) -> EngramStats | None:
        """What reading the Engram tables cost so far; None for a model without."""
        rows = self._handle().engram
        return None if rows is None else stats_of(rows)

    @property
    def numerics_id(self) -> str:
        """Names the arithmetic: equal ids mean equal bits (docs/numerics.md)."""
        return f"canonical-1{'+matrix-1' if self._matrix else ''}/{self._activations}"

    @property
    def prefill(self) -> Literal["exact", "matrix"]:
        """The numeric class of prompts, as it was asked for."""
        return "matrix" if self._matrix else "exact"

    @cached_property
    def weights_id(self) -> bytes:
        """32 bytes that name configuration and weights; made from samples of every tensor when first asked for."""
        return weights_id(self._checkpoint)

    @cached_property
    def store_root(self) -> bytes:
        """32 bytes that name everything a stored state depends on besides its tokens: `weights_id`, `numerics_id`,
        the layout of the rows and the version of the format."""
        c = self.config
        layout = (
            c.num_hidden_layers, c.head_dim, c.index_head_dim, c.sliding_window, tuple(c.kv_source_layer_ids),
            tuple(c.compress_ratios),
        )  # fmt: skip
        return root_id(self.weights_id, self.numerics_id, layout)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint. Raises TokenizerError when it has none or one that does not fit."""
        config, checkpoint = self.config, self._checkpoint
        if checkpoint.tokenizer_metadata is not None:
            data = checkpoint.tokenizer_metadata
            tokenizer = Tokenizer.from_gguf_metadata(
                data["tokens"],
                data["token_types"],
                data["merges"],
                config.bos_token_id,
                config.eos_token_id,
                pad_id=config.pad_token_id,
                pre=data["pre"],
            )
        elif checkpoint.tokenizer is not None:
            tokenizer = Tokenizer.from_file(
                checkpoint.tokenizer,
                bos_id=config.bos_token_id,
                eos_id=config.eos_token_id,
                pad_id=config.pad_token_id,
            )
        else:
            raise TokenizerError(f"{self.path}: there is no tokenizer.json; put the model's one into this folder")
        tokenizer.check(config)
        return tokenizer

    @cached_property
    def can_chat(self) -> bool:
        """Does the tokenizer have the chat markers?"""
        markers = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
        return all(self.tokenizer.find_control(marker) is not None for marker in markers)

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling options that generation_config.json recommends; options of a call override them."""
        generation = self._checkpoint.generation
        if generation.get("do_sample") is False:
            return {"temperature": 0.0}
        return {name: generation[name] for name in _SAMPLING_KEYS if generation.get(name) is not None}

    # ---- sessions ----------------------------------------------------------------------------------------------

    def plan(
        self,
        context: int | None = None,
        *,
        drafter: Drafter | None = None,
        retain: int = DEFAULT_RETAIN,
        chunk: int | None = None,
    ) -> tuple[MemoryPlan, int]:
        """What a session would take, and the chunk it would use (see `session`). Nothing is allocated."""
        self._check_drafter(drafter)
        longest = self.config.max_position_embeddings
        context = longest if context is None else positive_int("context", context, 1, longest)
        retain = positive_int("retain", retain, 0)
        if chunk is not None:
            chunk = positive_int("chunk", chunk, 1, 1 << 16)
        weights = self._weights + (drafter.weight_bytes if drafter is not None else 0)
        return plan_session(
            self.config,
            weights,
            self._engram_bytes,
            self._activations,
            context,
            min(retain, context),
            chunk,
            self._engram_memory,
            drafter,
            self.threads if self.backend.startswith("cpu/") else 0,
            self.backend,
            self._matrix,
        )

    def session(
        self,
        context: int | None = None,
        *,
        drafter: Drafter | None = None,
        store: KVStore | None = None,
        retain: int = DEFAULT_RETAIN,
        chunk: int | None = None,
        decoder: Literal["cone", "all"] = "cone",
    ) -> Session:
        """A new session.

        drafter: makes `generate` and `chat` faster where it pays; the tokens are the same with and without (E2).

        context: tokens it can hold; None takes the model's longest. Memory is committed as it fills.
        retain: how many tokens one can go back by plain truncation; after a long prefill 256 (see `decoder`).
        decoder: "cone": a prefill computes the decoder layers (those behind the last that makes compressed rows) only
            for the last rows, which is all that what follows depends on. "all": for every row; the same bits for about
            twice the work, and all of `retain` can be taken back for nothing.
        chunk: most rows of one prefill run. It never changes a result. None takes 8,192, less beside a small model (its
            working memory stays small too). Any choice becomes less when memory is short (`Session.chunk`).
        store: a KVStore. Prompts continue from what it holds, and the session puts its state there at the end of each
            prefill chunk and of each turn.
        Raises MemoryPlanError, with the numbers, when the session cannot fit.
        """
        from .session import Session

        if store is not None and not isinstance(store, KVStore):
            raise OptionError(f"store: expected a KVStore, such as KVStore(folder), or None, found {shown(store)}")
        choice("decoder", decoder, ("cone", "all"))
        plan, rows = self.plan(context, drafter=drafter, retain=retain, chunk=chunk)
        size = self.config.max_position_embeddings if context is None else context
        refuse_what_cannot_fit(plan, size)
        return Session(
            self,
            context=size,
            retain=min(retain, size),
            chunk=rows,
            drafter=drafter,
            store=store,
            every_row=decoder == "all",
        )

    def _check_drafter(self, drafter: Any) -> None:
        if drafter is None:
            return
        from .drafter import Drafter

        if not isinstance(drafter, Drafter):
            raise OptionError(f"drafter: expected a Drafter (see Drafter.open) or None, found {shown(drafter)}")
        drafter.check_for(self)

    def load_session(
        self,
        path: str | os.PathLike[str],
        context: int | None = None,
        *,
        drafter: Drafter | None = None,
        store: KVStore | None = None,
        retain: int = DEFAULT_RETAIN,
        chunk: int | None = None,
        decoder: Literal["cone", "all"] = "cone",
    ) -> Session:
        """A session that goes on where `Session.save` wrote this file, with the same bits (E3). Options as `session`.

        Raises StoreError when the file is damaged or belongs to another model or mode, ContextError when `context` is
        smaller than what it holds.
        """
        from . import saved

        where = path_of("path", path)
        saved.read_header(where)  # before anything is allocated
        session = self.session(context, drafter=drafter, store=store, retain=retain, chunk=chunk, decoder=decoder)
        try:
            saved.load(session._ext, where, self.store_root, self.numerics_id)
        except BaseException:
            session.close()
            raise
        return session

    # ---- life --------------------------------------------------------------------------------------------------

    def _handle(self) -> _ext.Model:
        if self._ext is None:
            raise StateError("this model is closed")
        return self._ext

    def close(self) -> None:
        """Let go of the weights; sessions that are still open keep them until they are closed."""
        self._ext = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        name = "nano" if self.path == NANO else self.path.name
        if self._ext is None:
            return f"<Model {name}: closed>"
        return (
            f"<Model {name}: {c.num_hidden_layers} layers, {c.n_routed_experts} experts, weights "
            f"{human(self._weights)}, {self.backend}, {self.threads} threads, activations {self._activations}, "
            f"prefill {self.prefill}>"
        )

    def _repr_html_(self) -> str:
        from html import escape

        c = self.config
        rows = {
            "path": "the nano model of the package" if self.path == NANO else str(self.path),
            "layers, experts": f"{c.num_hidden_layers}, {c.n_routed_experts} (top {c.num_experts_per_tok})",
            "context": f"{c.max_position_embeddings:,}",
            "weights": human(self._weights),
            "Engram on disk": human(self._engram_bytes),
            "back end": "closed" if self._ext is None else f"{self.backend}, {self.threads} threads",
            "activations": self._activations,
            "prefill": self.prefill,
        }
        return "<table>" + "".join(f"<tr><th>{k}</th><td>{escape(v)}</td></tr>" for k, v in rows.items()) + "</table>"


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_threads(wish: int | None) -> int:
    """Of the option `threads`: a thread for each core unless a number is given. OptionError for what is none."""
    return usable_cores() if wish is None else positive_int("threads", wish, 1, 1024)


def _check_matrix(isa: str, mode: str) -> None:
    """OptionError where there is no fast matrix class, and for a mode that it would not respect."""
    if mode == "fp32":
        raise OptionError('prefill="matrix" rounds activations to bfloat16, activations="fp32" does not; drop one')
    missing = f"the back end {isa} has none" if isa in DEVICES else _ext.matrix_missing(isa)
    if missing:
        raise OptionError(
            f'prefill="matrix" needs a processor with AVX-512-BF16 (Zen 4, Cooper Lake, Sapphire Rapids or later) and '
            f'backend="cpu" ({missing}); use prefill="exact"'
        )


def _isa(backend: Any) -> str:
    if not isinstance(backend, str):
        raise OptionError(f"backend: expected text, found {shown(backend)}")
    if backend in ("auto", "cpu"):
        return "auto"
    known = [f"cpu/{isa}" for isa in _ext.cpu_isas()]
    if backend in known:
        return backend.removeprefix("cpu/")
    if backend in DEVICES:
        reason = _ext.device_missing(backend)
        if reason:
            raise BackendError(f"backend: {backend} is not here ({reason}); here are: auto, cpu, {', '.join(known)}")
        return backend
    raise OptionError(f"backend: expected one of auto, cpu, {', '.join(known)}, metal, cuda; found {shown(backend)}")
