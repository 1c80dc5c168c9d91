"""Text to token ids and back: three kinds of tokenizer files, incremental decoding and chat templates behind one class.

Knows files and text only; nothing of models, devices or context lengths. Cutting text into tokens is left to the
packages `tokenizers` and `sentencepiece`. What is done here:

- The encoder knows special tokens by aliases, random ones that no text spells. Only what a chat template itself writes
  is put into aliases; what a user types stays ordinary text.
- An id stands for bytes, and text is those bytes read as UTF-8. So ids become text one by one, with constant work for
  each, and decoding all at once is the same thing by construction.
- A chat template is a stranger's program. It runs in a sandbox, in a process of its own (this file as a script), with
  limits on time and memory.
"""

import base64
import codecs
import contextlib
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

TEMPLATE_CPU_SECONDS = 2
TEMPLATE_WALL_SECONDS = 10  # reached only where the machine is starved of CPU time
TEMPLATE_BYTES = 512 << 20
TEMPLATE_CHARACTERS = 4_000_000

# Byte-level tokenizers write a byte as one printable character: itself where it is one, else the next from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = _PRINTABLE + [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTE_OF = dict(zip(map(chr, [*_PRINTABLE, *range(0x100, 0x144)]), _BYTES, strict=True))
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}

# Llama 3's tokenizer.model holds ranks alone; the rest is as in Meta's llama_models/llama3/tokenizer.py.
_LLAMA3_SPECIAL = [
    *("begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id"),
    *("step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag"),
    *(f"reserved_special_token_{i}" for i in range(2, 247)),
]
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_NONCE = secrets.token_hex(8)


class TokenizerError(ValueError):
    """Tokenizer files or a chat template that are missing, broken or unsupported, or text that cannot be encoded."""


class TextStream:
    """Token ids in, text out, each character as soon as it is certain and never half of one.

    Bytes that cannot become a character turn into U+FFFD. Special tokens and unknown ids read as nothing.
    """

    def __init__(self, pieces: Mapping[int, bytes], errors: str, leading_spaces: int) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._leading_spaces = leading_spaces  # how many may still be taken off the start of the text

    def push(self, token_id: int) -> str:
        """The characters that this id completes, maybe none."""
        piece = self._pieces.get(token_id, b"")
        if self._leading_spaces and piece:
            taken = min(self._leading_spaces, len(piece) - len(piece.lstrip(b" ")))
            piece = piece[taken:]
            self._leading_spaces = 0 if piece else self._leading_spaces - taken
        return self._text(piece)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, or nothing."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, final: bool = False) -> str:
        return re.sub("[\udc80-\udcff]", "\ufffd", self._utf8.decode(data, final))  # what surrogateescape leaves


class _Source(NamedTuple):
    """What a tokenizer file of any kind gives."""

    encode: Callable[[str], list[int]]  # of text in which aliases stand for special tokens
    special: dict[str, int]  # name to id
    names: dict[str, str]  # "bos_token", "eos_token" and the like to name, as chat templates know them
    prefix: list[int]  # ids that begin a text, unless tokenizer_config.json says otherwise
    pieces: dict[int, bytes]  # what each id reads as; special tokens have no entry
    errors: str  # of UTF-8: "surrogateescape", one U+FFFD a byte as SentencePiece; "replace", as byte-level decoders
    leading_spaces: int  # how many decoding takes off the start of a text, since the encoder puts them there


class Tokenizer:
    """Made by `load_tokenizer`. Encodes any text and decodes any ids; `vocab_size` is the highest known id + 1."""

    def __init__(self, source: _Source, config: Mapping[str, Any], template: str | None, directory: Path) -> None:
        self._source, self._template, self._directory = source, template, directory
        self._special = _any_of(source.special)
        self._bos = source.prefix or _ids_of("bos_token", source.names, source.special)
        add_bos = config.get("add_bos_token")
        self._add_bos = bool(source.prefix if add_bos is None else add_bos)
        self.bos_token_id = next(iter(self._bos), None)
        self.eos_token_id = next(iter(_ids_of("eos_token", source.names, source.special)), None)
        self.vocab_size = 1 + max([*source.pieces, *source.special.values()], default=-1)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Ids of a text. Special tokens spelled in it stay ordinary text; `bos=None` is as the checkpoint says."""
        if bos and not self._bos:
            raise TokenizerError(f"the tokenizer in {self._directory} has no BOS token")
        return (self._bos if (self._add_bos if bos is None else bos) else []) + self._encode(text)

    def decode(self, ids: Iterable[int], prompt: Iterable[int] = ()) -> str:
        """Text of the ids, as they continue the ids of `prompt`."""
        stream = self.stream(prompt)
        return "".join(map(stream.push, ids)) + stream.finish()

    def stream(self, prompt: Iterable[int] = ()) -> TextStream:
        """Decodes what follows `prompt`: SentencePiece's first space is dropped only where the text begins."""
        stream = TextStream(self._source.pieces, self._source.errors, self._source.leading_spaces)
        for token_id in prompt:
            stream.push(token_id)
        return stream

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, {"role": ..., "content": ...} a message, as the checkpoint's template writes it.

        BOS comes from the template alone. Raises TokenizerError when there is no template, or when it fails.
        """
        if self._template is None:
            raise TokenizerError(
                f"no chat template in {self._directory}: neither chat_template.jinja nor one in tokenizer_config.json"
            )
        # A special token spelled in a message passes the template as one character that occurs nowhere else.
        occupied = {*self._template, *json.dumps(messages, ensure_ascii=False)}
        unused = (character for character in map(chr, range(0xF0000, 0x10FFFE)) if character not in occupied)
        stand_ins = {name: next(unused) for name in self._source.special}
        variables = {
            **self._source.names,
            "messages": _map_strings(lambda text: self._special.sub(lambda name: stand_ins[name[0]], text), messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        text = _render(self._template, variables)
        text = self._special.sub(lambda name: _alias(self._source.special[name[0]]), text)
        return self._encode(text.translate({ord(stand_in): name for name, stand_in in stand_ins.items()}))

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()  # says more clearly than the packages what is wrong with a lone surrogate
            return self._source.encode(text)
        except Exception as error:  # theirs are bare ones
            reason = f"the tokenizer in {self._directory} cannot encode this text"
            raise TokenizerError(f"{reason}: {_one_line(error)}") from error


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint directory: tokenizer.json, else tokenizer.model (SentencePiece or Llama 3's).

    Raises TokenizerError, which names the file, when there is none or it is broken or of an unsupported kind.
    """
    directory = Path(directory)
    config = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    template = _read_template(directory / "chat_template.jinja", config)
    path = next((path for name in ("tokenizer.json", "tokenizer.model") if (path := directory / name).is_file()), None)
    if path is None:
        raise TokenizerError(f"no tokenizer in {directory}: found neither tokenizer.json nor tokenizer.model")
    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            source = _from_json(json.loads(data), config)
        elif re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data):
            source = _from_llama3(data, config)
        else:
            source = _from_sentencepiece(data, config)
        return Tokenizer(source, config, template, directory)
    except Exception as error:  # the packages raise bare ones, and JSON of a wrong shape leads to any kind
        raise TokenizerError(f"{path}: not a usable tokenizer: {_one_line(error)}") from error


def _from_json(spec: dict[str, Any], config: Mapping[str, Any]) -> _Source:
    from tokenizers import Tokenizer as Library

    model, vocabulary = spec["model"], spec["model"]["vocab"]  # name to id; of a Unigram model, [name, score] by id
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {name: i for i, (name, _) in enumerate(vocabulary)}
    added = _added_tokens(spec.get("added_tokens") or [], ids, config)
    special = {token["content"]: i for i, token in added.items() if token["special"]}
    reading = _read_pieces(ids, added, spec.get("decoder"))
    for i, token in added.items():
        name = token["content"]
        if token["special"]:
            token |= {"content": _alias(i), "normalized": False}
        if isinstance(vocabulary, dict):
            vocabulary.pop(name, None)
            vocabulary[token["content"]] = i
        elif i < len(vocabulary):
            vocabulary[i][0] = token["content"]
        if model.get("unk_token") == name:
            model["unk_token"] = token["content"]
    spec |= {"added_tokens": [added[i] for i in sorted(added)], "truncation": None, "padding": None}
    library = Library.from_str(json.dumps(spec))
    for i, token in added.items():
        if library.token_to_id(token["content"]) != i:
            raise TokenizerError(f"its added token {i} leaves a gap after the vocabulary")

    def encode(text: str) -> list[int]:
        return library.encode(text, add_special_tokens=False).ids

    return _Source(encode, special, _names(config), _post_processor_prefix(spec.get("post_processor")), *reading)


def _from_llama3(data: bytes, config: Mapping[str, Any]) -> _Source:
    """From lines of a token in base64 and its rank, which is its id and its turn to be merged, by way of a
    tokenizer.json: every cut of a token into two others is a merge."""
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in map(bytes.split, data.splitlines())}
    names = {token: "".join(map(_CHARACTER_OF.__getitem__, token)) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        cuts = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += [[names[left], names[right]] for left, right in sorted(cuts, key=lambda cut: ranks[cut[0]])]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    added = [
        {"id": i, "content": f"<|{name}|>", "special": True}
        for i, name in enumerate(_LLAMA3_SPECIAL, start=max(ranks.values()) + 1)
    ]
    words = {"type": "Split", "pattern": {"Regex": _LLAMA3_WORDS}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": True},
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
        "decoder": byte_level,
    }
    source = _from_json(spec, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} | config)
    return source._replace(prefix=_ids_of("bos_token", source.names, source.special))


def _from_sentencepiece(data: bytes, config: Mapping[str, Any]) -> _Source:
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor()
    library.LoadFromSerializedProto(data)
    ids = {library.id_to_piece(i): i for i in range(library.get_piece_size())}
    marks = {"bos_token": library.bos_id(), "eos_token": library.eos_id(), "unk_token": library.unk_id()}
    names = {key: library.id_to_piece(i) for key, i in marks.items() if i >= 0} | _names(config)
    control = [name for name, i in ids.items() if library.is_control(i) or library.is_unknown(i)]
    declared = [{"id": ids[name], "content": name, "special": True} for name in control]
    added = _added_tokens(declared, ids, {**config, **names})
    special = {token["content"]: i for i, token in added.items() if token["special"]}
    pieces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    pieces, errors, _ = _read_pieces(ids, added, {"decoders": [pieces, {"type": "ByteFallback"}]})

    def continued(text: str) -> list[int]:
        """Without the space that begins every text: it goes before a control character instead."""
        mark, ids = library.encode("\x1e"), library.encode("\x1e" + text)
        return ids[len(mark) :] if ids[: len(mark)] == mark else library.encode(text)

    known = {_alias(i) if token["special"] else token["content"]: [i] for i, token in added.items()}
    for name, i in special.items():
        if i in library.encode(name):  # a user-defined piece, which SentencePiece finds in any text
            known[name] = continued(name[:1]) + continued(name[1:])
    cut = re.compile(f"({_any_of(known).pattern})")
    later = continued if config.get("legacy") is False else library.encode  # "legacy": a space after tokens, too

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(filter(None, cut.split(text))):
            ids += known.get(part) or (later if i else library.encode)(part)
        return ids

    if library.encode("  x") == library.encode("x"):
        spaces = sys.maxsize
    else:
        spaces = int(library.encode("x", out_type=str)[0].startswith("▁"))
    return _Source(encode, special, names, _ids_of("bos_token", names, special), pieces, errors, spaces)


def _added_tokens(declared: list[dict], ids: Mapping[str, int], config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Tokens that are found in a text as a whole, by id, in the form of tokenizer.json's "added_tokens".

    Those that the file declares, those of tokenizer_config.json, and BOS and EOS, which are special in any case.
    """
    ends = {name for key, name in _names(config).items() if key in ("bos_token", "eos_token")}
    declared = [
        *declared,
        *({**token, "id": int(i)} for i, token in (config.get("added_tokens_decoder") or {}).items()),
        *({"content": name, "id": ids[name]} for name in ends if name in ids),
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added: dict[int, dict[str, Any]] = {}
    for token in filter(lambda token: token["content"], declared):
        i = ids.get(token["content"], token["id"])
        known = added.setdefault(i, flags | token | {"id": i})
        known["special"] |= token.get("special", False) or token["content"] in ends
    return added


def _read_pieces(
    ids: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], decoder: Mapping[str, Any] | None
) -> tuple[dict[int, bytes], str, int]:
    """What ids read as under a decoder of tokenizer.json: `pieces`, `errors` and `leading_spaces` of _Source."""
    replacements, byte_level, byte_fallback = [], False, False
    separator, spaces = ("", 0) if decoder else (" ", 1)  # without a decoder tokens are words
    for step in decoder.get("decoders", [decoder]) if decoder else []:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": old, **options}:
                replacements.append((old, " "))
                spaces += options.get("prepend_scheme") != "never" and options.get("add_prefix_space", True)
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                spaces += start
            case _:
                raise TokenizerError(f"its decoder has a step of an unsupported kind, {step}")

    def read(name: str) -> bytes:
        if byte_level and _BYTE_OF.keys() >= set(name):
            return bytes(map(_BYTE_OF.__getitem__, name))
        if byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
            return bytes([int(name[3:5], 16)])
        for old, new in replacements:
            name = name.replace(old, new)
        return (separator + name).encode()

    pieces = {i: token["content"].encode() for i, token in added.items()} | {i: read(name) for name, i in ids.items()}
    pieces = {i: piece for i, piece in pieces.items() if not (i in added and added[i]["special"])}
    return pieces, "replace" if byte_level else "surrogateescape", spaces


def _post_processor_prefix(processor: Mapping[str, Any] | None) -> list[int]:
    """Ids that a post-processor of tokenizer.json puts before a text."""
    ids: list[int] = []
    for step in processor.get("processors", [processor]) if processor else []:
        if step["type"] == "TemplateProcessing":
            for item in takewhile(lambda item: "SpecialToken" in item, step["single"]):
                ids += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
    return ids


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """The entries "bos_token", "eos_token", ... of tokenizer_config.json, each a name or a record with "content"."""
    records = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return {key: name for key, name in records.items() if key.endswith("_token") and isinstance(name, str)}


def _ids_of(key: str, names: Mapping[str, str], special: Mapping[str, int]) -> list[int]:
    return [special[names[key]]] if names.get(key) in special else []


def _alias(token_id: int) -> str:
    return f"<{_NONCE}:{token_id}>"


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def _map_strings(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(change, item) for item in value]
    return value


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, TokenizerError) else f"{type(error).__name__}: {text}"


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value


def _read_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The file's text, else tokenizer_config.json's "chat_template": a text, or records of which one is "default"."""
    if path.is_file():
        return path.read_bytes().decode(errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template, from a process of its own; TokenizerError when it fails or needs more than the limits."""
    reason = ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child = subprocess.run(
            [sys.executable, "-P", "-X", "utf8", __file__],
            input=json.dumps([template, variables]),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TEMPLATE_WALL_SECONDS,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        if child.returncode == 0:
            return json.loads(child.stdout)
        reason = child.stderr.strip().rpartition("\n")[2]
    if not reason or reason.startswith("MemoryError"):
        reason = f"it needs more than {TEMPLATE_CPU_SECONDS} s of CPU time or {TEMPLATE_BYTES >> 20} MiB"
    raise TokenizerError(f"the chat template failed: {reason}")


def _run_template() -> None:
    """That process: [template, variables] on stdin and the text on stdout, both as JSON, an error on stderr.

    Offers templates what transformers offers (utils/chat_template_utils.py), since they are written for it.
    """
    import resource
    from datetime import datetime
    from functools import partial

    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks an assistant's words for training and changes nothing here."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def refuse(value: Any, attribute: str) -> None:
        raise SecurityError(f"access to {attribute!r} of a {type(value).__name__} is refused")

    sys.excepthook = lambda kind, error, _: print(f"{kind.__name__}: {' '.join(str(error).split())}", file=sys.stderr)
    for kind, limit in ((resource.RLIMIT_CPU, TEMPLATE_CPU_SECONDS), (resource.RLIMIT_AS, TEMPLATE_BYTES)):
        with contextlib.suppress(ValueError):  # where a lower limit holds already, or the system (macOS) has none
            resource.setrlimit(kind, (limit, limit))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.unsafe_undefined = refuse  # at once, not only when the value is used
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template, variables = json.load(sys.stdin)
    text = environment.from_string(template).render(variables)
    if len(text) > TEMPLATE_CHARACTERS:
        raise TemplateError(f"it writes more than {TEMPLATE_CHARACTERS} characters")
    print(json.dumps(text))


if __name__ == "__main__":
    _run_template()
