"""Readers: from a package archive to titled documents made of clean English paragraphs."""

from __future__ import annotations

import gzip
import html
import io
import json
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tools.build_pair.sources import Source


@dataclass
class Document:
    """One page, book chapter or entry: a title and its paragraphs in order."""

    source: str
    title: str
    paragraphs: list[str]


_ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": " - ",
        "\u2026": "...",
        "\u00a0": " ",
        "\u00b6": "",
        "\u00ad": "",
        "\u200b": "",
        "\u2032": "'",
        "\u2022": " ",
        "\ufb01": "fi",
        "\ufb02": "fl",
        "\u2010": "-",
        "\u2011": "-",
        "\u00d7": "x",
        "\u00a7": "section ",
    }
)
_COMMON = frozenset(
    [
        "the",
        "of",
        "and",
        "to",
        "a",
        "in",
        "is",
        "that",
        "it",
        "for",
        "as",
        "with",
        "are",
        "be",
        "was",
        "this",
        "by",
        "on",
        "not",
        "or",
        "from",
        "an",
        "which",
        "can",
        "if",
        "will",
        "you",
        "have",
        "at",
        "his",
        "he",
        "they",
        "has",
        "but",
        "were",
        "all",
        "when",
        "their",
        "would",
        "there",
        "its",
    ]
)
_WORD = re.compile(r"[A-Za-z']+")
_ODD = re.compile(r"[^A-Za-z0-9 ,.;:'\"()!?-]")


def clean(text: str) -> str:
    """Collapse blanks and map typographic characters to ASCII."""
    text = html.unescape(text).translate(_ASCII)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r" ([,.;:!?)])", r"\1", text).replace("( ", "(")


def is_prose(text: str) -> bool:
    """True for a paragraph that reads as English sentences and not as code, tables or menus."""
    if not 50 <= len(text) <= 2400 or text[-1] not in ".!?\"')" or not text.isascii():
        return False
    if not (text[0].isupper() or text[0] in "\"'"):
        return False
    words = _WORD.findall(text)
    if len(words) < 9 or not 3.0 <= sum(map(len, words)) / len(words) <= 7.5:
        return False
    if len(_ODD.findall(text)) > 0.02 * len(text):
        return False
    if sum(c.isdigit() for c in text) > 0.05 * len(text):
        return False
    common = sum(word.lower() in _COMMON for word in words)
    return common >= 0.22 * len(words) and sum(map(len, words)) >= 0.70 * len(text)


_DROP = re.compile(
    r"<(script|style|pre|head|nav|header|footer|table|svg|math)\b.*?</\1\s*>|<!--.*?-->",
    re.S | re.I,
)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.S | re.I)
_BLOCK = re.compile(
    r"</?(?:p|div|li|ul|ol|dl|dt|dd|h[1-6]|section|article|blockquote|body|br|tr|td)\b[^>]*>",
    re.I,
)
_TAG = re.compile(r"<[^>]+>")
_TITLE_TAIL = re.compile(r"\s+(?:[-\u2014\u2013|:\u00bb]|::)\s+.*$")


def read_html(name: str, data: bytes) -> Iterator[tuple[str, list[str]]]:
    """One document from an HTML page: the text of its blocks without code and tables."""
    if not name.endswith((".html", ".htm", ".xhtml", ".html.en", ".en.utf8", ".html.gz")):
        return
    page = data.decode("utf-8", "replace")
    found = _TITLE.search(page)
    title = _TITLE_TAIL.sub("", clean(_TAG.sub("", found[1]))) if found else ""
    title = re.sub(r"^(OpenStack Docs: |[\d.]+\s*)", "", title)
    body = _TAG.sub("", _BLOCK.sub("\x00", _DROP.sub("\x00", page)))
    yield title, [clean(block) for block in body.split("\x00") if len(block) > 40]


def read_pod(name: str, data: bytes) -> Iterator[tuple[str, list[str]]]:
    """A document for each `=head1` of a pod page."""
    if not name.endswith(".pod"):
        return
    text = data.decode("utf-8", "replace")
    text = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", text)
    for _ in range(2):
        text = re.sub(r"[BCEFISXZ]<([^<>]*)>", r"\1", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
    for part in re.split(r"^=head1 ", text, flags=re.M)[1:]:
        head, _, rest = part.partition("\n")
        blocks = [b for b in rest.split("\n\n") if b and b[0] not in " \t="]
        yield clean(head).capitalize(), [clean(b) for b in blocks]


def read_man(name: str, data: bytes) -> Iterator[tuple[str, list[str]]]:
    """One document from a manual page written with the man macros."""
    if not name.endswith(".gz"):
        return
    try:
        text = gzip.decompress(data).decode("utf-8", "replace")
    except (OSError, EOFError):
        return
    text = re.sub(r"\\f[A-Z]|\\f\(..|\\&|\\c|\\s[-+]?\d", "", text)
    text = text.replace("\\-", "-").replace("\\*(C`", '"').replace("\\*(C'", '"')
    text = re.sub(r"\\\(aq|\\\*\(Aq", "'", text)
    text = re.sub(r"^\.(?:B|I|IR|BR|BI|RB|RI) (.*)$", r"\1", text, flags=re.M)
    blocks = re.split(r"^\.(?:PP|SH|SS|IP|LP|TP|P|Sp|Vb|Ve|nf|fi|RS|RE|QW|AP).*$", text, flags=re.M)
    kept = [clean(re.sub(r"^[.'].*$", "", b, flags=re.M)) for b in blocks]
    yield Path(name).name.split(".")[0], kept


_OSIS_BREAK = re.compile(r"<(?:div|title|table|list|item|/item|chapter|lb|p|l|row)\b[^>]*>", re.I)
_OSIS_DROP = re.compile(r"<(?:title|table|note)\b[^>]*>.*?</(?:title|table|note)>", re.S)


def read_sword(folder: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Documents of a compressed SWORD module: one for each book of the text."""
    for name, data in sorted(folder.items()):
        if not name.endswith("zz"):
            continue
        index = folder[name[:-1] + "s"]
        for at in range(0, len(index), 12):
            start, size, _ = struct.unpack("<III", index[at : at + 12])
            try:
                text = zlib.decompress(data[start : start + size]).decode("utf-8", "replace")
            except zlib.error:
                continue
            found = re.search(r'<title type="x-ms">([^<]*)|<milestone n="([^"]+)"', text)
            title = clean(found[1] or found[2]) if found else ""
            for chapter in re.split(r"<chapter n=", text):
                body = _OSIS_BREAK.sub("\x00", _OSIS_DROP.sub("\x00", chapter))
                yield title, [clean(_TAG.sub("", block)) for block in body.split("\x00")]


def read_devil(data: bytes) -> Iterator[tuple[str, list[str]]]:
    """Entries of Bierce's dictionary, prose parts only."""
    text = gzip.decompress(data).decode("utf-8", "replace")
    for entry in re.split(r"\n\n(?=[A-Z][A-Z' -]+, [a-z]+\.)", text)[1:]:
        head, _, rest = entry.partition(",")
        body = re.sub(r"^\s*[a-z.]+\s+", "", rest)
        paragraphs = [clean(p) for p in body.split("\n\n") if not p.startswith("    ")]
        yield head.strip().capitalize(), paragraphs


def _facts(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key == "text" and isinstance(value, str):
            yield path, value
        else:
            yield from _facts(value, (*path, key))


def read_factbook(name: str, data: bytes) -> Iterator[tuple[str, list[str]]]:
    """One document a country; each paragraph is `field: text`."""
    if not name.endswith(".json") or "package.json" in name:
        return
    tree = cast(dict[str, Any], json.loads(data))
    names = tree.get("Government", {}).get("Country name", {})
    country = names.get("conventional short form", {}).get("text", "none")
    if country == "none":
        country = names.get("conventional long form", {}).get("text", "")
    facts = [f"{path[-1]}\t{clean(text)}" for path, text in _facts(tree, ())]
    yield clean(country), facts


def members(archive: Path, limit: int, skip: str = "") -> Iterator[tuple[str, bytes]]:
    """Regular files of a .deb or .tgz archive, up to `limit` of them, without those of `skip`."""
    if archive.suffix == ".deb":
        done = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], capture_output=True, check=True
        )
        stream, mode = io.BytesIO(done.stdout), "r:"
    else:
        stream, mode = io.BytesIO(archive.read_bytes()), "r:gz"
    wanted = re.compile(r"\.(html|htm|xhtml|en|utf8|gz|pod|[bc]z[zs]|json|dz|noun|verb|adj|adv)$")
    count = 0
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
        for member in tar:
            if skip and re.search(skip, member.name):
                continue
            if member.isfile() and member.size < 16_000_000 and wanted.search(member.name):
                handle = tar.extractfile(member)
                if handle is not None:
                    yield member.name, handle.read()
                    count += 1
            if count >= limit:
                return


def read_source(source: Source, archive: Path) -> Iterator[Document]:
    """All documents of one package (WordNet has its own reader)."""
    each: dict[str, Callable[[str, bytes], Iterator[tuple[str, list[str]]]]] = {
        "html": read_html, "pod": read_pod, "man": read_man, "factbook": read_factbook,
    }  # fmt: skip
    if source.reader == "sword":
        pairs = read_sword(dict(members(archive, source.max_files)))
    elif source.reader == "devil":
        pairs = (
            pair
            for name, data in members(archive, 10_000)
            if name.endswith(".dz")
            for pair in read_devil(data)
        )
    else:
        reader = each[source.reader]
        pairs = (
            pair
            for name, data in members(archive, source.max_files, source.skip)
            for pair in reader(name, data)
        )
    for title, blocks in pairs:
        if source.reader != "factbook":
            blocks = [block for block in blocks if is_prose(block)]
        if blocks:
            yield Document(source.package, title, blocks)
