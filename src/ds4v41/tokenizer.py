"""Text <-> token ids, safe by default: text never turns into a control token unless the caller asks for it."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ds4v41.checks import path_of
from ds4v41.errors import OptionError, TokenError, TokenizerError, shown
from ds4v41.tokenizer_spec import TokenizerSpec, byte_of_char, refuse, spec_from_gguf, spec_from_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Backend

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"


class _TokenConfig(Protocol):
    """The part of a model configuration that a tokenizer has to agree with."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int: ...
    @property
    def eos_token_id(self) -> int: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def image_token_id(self) -> int | None: ...


class Tokenizer:
    """The model's byte-level BPE.

    Immutable after construction, so one object may be used from any number of threads. Encoding adds nothing by
    itself: BOS comes from `add_bos=True` or from the chat renderer, never from both.

    >>> tokenizer = Tokenizer.from_file("tokenizer.json")        # doctest: +SKIP
    >>> tokenizer.encode("<think>") == tokenizer.encode("<think>", control=True)     # doctest: +SKIP
    False
    """

    def __init__(
        self, spec: TokenizerSpec, *, bos_id: int | None = None, eos_id: int | None = None, pad_id: int | None = None
    ) -> None:
        self._spec = spec
        self._strings = spec.strings
        self._backend = _load_backend(spec)
        self._added = {a.text: a.id for a in spec.added}
        self._special_ids = frozenset(self._added.values())
        self._passes = _control_patterns(spec)
        self._bytes: list[bytes | None] = [None] * len(spec.strings)
        self._bos_id = self._pick("bos_id", bos_id, BOS)
        self._eos_id = self._pick("eos_id", eos_id, EOS)
        self._pad_id = self._pick("pad_id", pad_id, PAD)

    # construction -----------------------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **ids: int | None) -> Tokenizer:
        """Read `tokenizer.json` (or a folder that holds one). `bos_id`, `eos_id`, `pad_id` name the ids of a
        vocabulary that does not use DeepSeek's names for them.

        Raises TokenizerError when the file is missing, damaged or not the V4.1 vocabulary.
        """
        file = path_of("path", path)
        if os.path.isdir(file):
            file = file / "tokenizer.json"
        if not os.path.isfile(file):
            raise TokenizerError(f"{file}: expected a tokenizer.json, found no such file. Give the path of the "
                                 "tokenizer.json in the model's folder.")
        try:
            data = file.read_bytes()
        except OSError as error:
            raise TokenizerError(f"{file}: cannot be read ({error.strerror}).") from error
        return cls.from_bytes(data, source=str(file), **ids)

    @classmethod
    def from_bytes(cls, data: bytes | str, *, source: str = "tokenizer.json", **ids: int | None) -> Tokenizer:
        """As from_file, from the content of a tokenizer.json; `source` is the name used in errors."""
        raw = data.encode("utf-8") if isinstance(data, str) else bytes(data)
        return cls(spec_from_json(raw, source), **ids)

    @classmethod
    def from_gguf_metadata(
        cls,
        tokens: Sequence[str],
        token_types: Sequence[int] | None,
        merges: Sequence[str],
        bos_id: int | None = None,
        eos_id: int | None = None,
        *,
        pad_id: int | None = None,
        pre: str = "joyai-llm",
        source: str = "GGUF metadata",
    ) -> Tokenizer:
        """Build the tokenizer from the `tokenizer.ggml.*` records of a GGUF file.

        Gives the same ids as the tokenizer.json the records came from. Token types, `add_bos_token` and
        `add_eos_token` are not believed. `pre` is `tokenizer.ggml.pre`; joyai-llm, deepseek-v3 and hunyuan-dense
        mean the same rules.
        """
        spec = spec_from_gguf(list(tokens), token_types, list(merges), pre, source)
        return cls(spec, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id)

    def _pick(self, name: str, given: int | None, text: str) -> int | None:
        if given is None:
            return self._added.get(text)
        if type(given) is not int or not 0 <= given < len(self._strings):
            raise TokenizerError(f"{self._spec.source}: {name} is {given!r}, expected an id below {len(self._strings)}")
        known = self._added.get(text)
        if known is not None and known != given:
            raise TokenizerError(f"{self._spec.source}: {name} is {given}, but {text!r} has id {known}; one of the "
                                 "two files belongs to another model")
        return given

    # properties -------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are 0 .. vocab_size - 1."""
        return len(self._strings)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all added tokens, whatever the file's own `special` flag says."""
        return self._special_ids

    @property
    def bos_id(self) -> int:
        """Id of the begin-of-sentence token."""
        return self._known("bos_id", self._bos_id)

    @property
    def eos_id(self) -> int:
        """Id of the end-of-sentence token, the only token that ends an answer."""
        return self._known("eos_id", self._eos_id)

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self._known("pad_id", self._pad_id)

    def _known(self, name: str, value: int | None) -> int:
        if value is None:
            raise TokenizerError(f"{self._spec.source}: the vocabulary does not name its {name}; pass {name}= when "
                                 "opening it (the model's config.json has it)")
        return value

    def control_id(self, text: str) -> int:
        """Id of the control token spelled `text`. Raises TokenizerError when the vocabulary has no such token."""
        try:
            return self._added[text]
        except KeyError:
            raise TokenizerError(f"{self._spec.source}: the vocabulary has no control token {text!r}; it is not a "
                                 "V4.1 vocabulary, so chat cannot be rendered with it") from None

    def find_control(self, text: str) -> int | None:
        """As control_id, but None when the vocabulary has no such token."""
        return self._added.get(text)

    def check(self, config: _TokenConfig) -> None:
        """Refuse (TokenizerError, all problems at once) a tokenizer that does not belong to `config`."""
        problems = []
        if config.vocab_size != self.vocab_size:
            problems.append(f"{self.vocab_size} tokens, but the model's vocab_size is {config.vocab_size}")
        for name, own in (("bos", self._bos_id), ("eos", self._eos_id), ("pad", self._pad_id)):
            wanted = getattr(config, f"{name}_token_id")
            if own is not None and wanted is not None and own != wanted:
                problems.append(f"{name} token is {own}, but the model's {name}_token_id is {wanted}")
        image, wanted = self._added.get("<｜deepseek_image｜>"), config.image_token_id
        if image is not None and wanted is not None and image != wanted:
            problems.append(f"image token is {image}, but the model's image_token_id is {wanted}")
        refuse(self._spec.source, problems, "Use the tokenizer that came with the model")

    # encoding ---------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_bos: bool = False, control: bool = False) -> list[int]:
        """Ids of `text`.

        By default text that spells a control token is ordinary text and gives ordinary ids, so what a user or a
        tool writes can never act as one. With `control=True` every added token spelled in the text is recognised,
        as other tokenizers do: for prompts that you wrote yourself. `add_bos=True` puts BOS in front; with
        `control=True` a BOS spelled at the start of the text is then not doubled.

        Raises OptionError for anything but a string, and for lone surrogates (not encodable as UTF-8).
        """
        if not isinstance(text, str):
            raise OptionError(f"text: expected str, found {type(text).__name__}")
        ids = list(self._encode_control(text)) if control else self._encode_plain(text)
        if add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise OptionError(f"text: character {error.start} is a lone surrogate ({text[error.start]!r}), which has "
                              "no UTF-8 form. Decode the bytes it came from with errors='replace'.") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_control(self, text: str) -> Iterator[int]:
        for piece in _split_controls(text, self._passes):
            if isinstance(piece, re.Match):
                yield self._added[piece.group()]
            else:
                yield from self._encode_plain(piece)

    # decoding ---------------------------------------------------------------------------------------------------

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for (control tokens: their spelling). Raises TokenError out of range."""
        self.validate_ids((token_id,))
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        text = self._strings[token_id]
        table = byte_of_char()
        if token_id in self._special_ids or any(c not in table for c in text):
            return text.encode("utf-8")
        return bytes(table[c] for c in text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special=True` leaves all added tokens out."""
        known = list(ids)
        self.validate_ids(known)
        special = self._special_ids
        parts = [self.token_bytes(i) for i in known if not (skip_special and i in special)]
        return b"".join(parts).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """One token for display: its text, with U+FFFD for a token that holds part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def validate_ids(self, ids: Iterable[Any]) -> None:
        """Raise TokenError for the first id that is not an int in 0 .. vocab_size - 1."""
        size = len(self._strings)
        for position, i in enumerate(ids):
            # numpy integers are fine; bool is an int in Python but never a token id
            index = getattr(i, "__index__", None)
            if index is None or isinstance(i, bool) or not 0 <= index() < size:
                raise TokenError(f"token {position}: expected an id in 0 .. {size - 1}, found {shown(i)}")

    def stream(self, *, skip_special: bool = False) -> StreamDecoder:
        """A decoder that takes one id at a time and never splits a character."""
        return StreamDecoder(self, skip_special=skip_special)

    def __len__(self) -> int:
        return len(self._strings)

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, {len(self._special_ids)} added, from {self._spec.source})"


class StreamDecoder:
    """Ids in, text out, as soon as whole characters are there.

    What all calls return, joined, is exactly `Tokenizer.decode` of all ids. One per stream; not for several threads.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that the id completes; empty while a character is not complete. Raises TokenError out of range."""
        data = self._tokenizer.token_bytes(token_id)
        return "" if token_id in self._skip else self._utf8.decode(data)

    def flush(self) -> str:
        """End of the stream: U+FFFD for a character that was cut, else nothing. The decoder starts anew."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text

    @property
    def pending(self) -> bool:
        """True while bytes of an incomplete character are held."""
        return bool(self._utf8.getstate()[0])


def _load_backend(spec: TokenizerSpec) -> _Backend:
    from tokenizers import Tokenizer as Backend  # here, because importing it takes longer than the rest of us

    try:
        return Backend.from_str(spec.base_json)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics are BaseException
        raise TokenizerError(f"{spec.source}: the tokenizers library refuses the model ({error})") from None


def _control_patterns(spec: TokenizerSpec) -> tuple[re.Pattern[str], ...]:
    """One pattern per pass, as the tokenizers library does it: first the tokens that are not normalised."""
    passes = []
    for normalized in (False, True):
        texts = sorted((a.text for a in spec.added if a.normalized is normalized), key=len, reverse=True)
        if texts:
            passes.append(re.compile("|".join(map(re.escape, texts))))
    return tuple(passes)


def _split_controls(text: str, passes: Sequence[re.Pattern[str]]) -> Iterator[str | re.Match[str]]:
    if not passes:
        yield text
        return
    end = 0
    for match in passes[0].finditer(text):
        yield from _split_controls(text[end : match.start()], passes[1:])
        yield match
        end = match.end()
    yield from _split_controls(text[end:], passes[1:])
