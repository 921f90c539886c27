"""WordNet glosses and examples as questions with short answers."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.build_pair.readers import members

Chat = tuple[str, str, str]  # key word, question, answer

_POS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


@dataclass
class Synset:
    """A meaning: its words, gloss, example sentences and links."""

    pos: str
    words: list[str]
    gloss: str
    examples: list[str]
    parents: list[str] = field(default_factory=list)
    opposites: list[str] = field(default_factory=list)


def parse(archive: Path) -> dict[str, Synset]:
    """All synsets of the package, by part of speech and offset."""
    synsets: dict[str, Synset] = {}
    for name, data in members(archive, 100):
        if "/data." not in name:
            continue
        for line in data.decode("ascii", "replace").splitlines():
            if line.startswith("  "):
                continue
            head, _, text = line.partition(" | ")
            parts = head.split()
            count = int(parts[3], 16)
            words = [
                re.sub(r"\(.*\)", "", w).replace("_", " ") for w in parts[4 : 4 + 2 * count : 2]
            ]
            at = 4 + 2 * count
            links = [parts[i : i + 4] for i in range(at + 1, at + 1 + 4 * int(parts[at]), 4)]
            kind = "a" if parts[2] == "s" else parts[2]
            # A gloss may hold several senses before its quoted examples.
            gloss = re.split(r';\s*"', text)[0].strip().rstrip(";").strip()
            gloss = re.sub(r"^\([^)]*\)\s*", "", gloss) if gloss.count("(") == 1 else gloss
            found = [e.strip() for e in re.findall(r'"([^"]+)"', text)]
            synsets[kind + parts[0]] = Synset(
                kind,
                words,
                gloss,
                [e for e in found if len(e.split()) >= 4],
                [link[2] + link[1] for link in links if link[0] in ("@", "@i")],
                [link[2] + link[1] for link in links if link[0] == "!"],
            )
    return synsets


def article(word: str) -> str:
    """`word` with its indefinite article; names and plurals stay bare."""
    if word[0].isupper() or word.endswith("s"):
        return word
    return ("an " if word[0] in "aeiou" else "a ") + word


def listing(words: list[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def sentence(text: str) -> str:
    """Capitalised, with a full stop."""
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else text + "."


def define(word: str, pos: str, senses: list[Synset]) -> str:
    """The dictionary entry of `word` as one part of speech."""
    head = f"{word[0].upper()}{word[1:]} ({_POS[pos]}): "
    if len(senses) == 1:
        return head + senses[0].gloss.rstrip(".") + "."
    return head + " ".join(f"{i}. {s.gloss.rstrip('.')}." for i, s in enumerate(senses, 1))


def chats(synsets: dict[str, Synset], rng: random.Random) -> Iterator[Chat]:
    """Questions and answers about every word; the key is the word asked about."""
    by_word: dict[tuple[str, str], list[Synset]] = defaultdict(list)
    children: dict[str, list[str]] = defaultdict(list)
    for key, synset in synsets.items():
        for word in synset.words:
            by_word[word, synset.pos].append(synset)
        for parent in synset.parents:
            children[parent].append(key)
    key_of = {id(synset): key for key, synset in synsets.items()}
    for (word, pos), found in by_word.items():
        if not word.isascii() or not re.fullmatch(r"[A-Za-z][A-Za-z '.-]*", word):
            continue
        senses = found[:3]
        noun = article(word)
        questions = [
            f"Define {word}.",
            f"What does {word} mean?",
            f"What is the meaning of {word}?",
        ]
        if pos == "n":
            questions += [f"What is {noun}?"] * 2
        if pos == "v":
            questions += [f"Define the verb {word}.", f"What does it mean to {word}?"]
        yield word, rng.choice(questions), define(word, pos, senses)
        first = senses[0]
        gloss = first.gloss.rstrip(".")
        if first.examples:
            question = rng.choice(
                [f"Use {word} in a sentence.", f"Give an example sentence with {word}.",
                 f"Write a sentence that uses the word {word}."]
            )  # fmt: skip
            yield word, question, sentence(first.examples[0])
        others = [w for w in first.words if w != word and w.isascii()]
        if others:
            text = listing([word, *others[:4]][1:])
            verb = "A synonym" if len(others) == 1 else "Synonyms"
            be = "is" if len(others) == 1 else "are"
            question = rng.choice([f"What is a synonym of {word}?", f"Give synonyms of {word}."])
            yield word, question, f"{verb} of {word} {be} {text}."
        if first.opposites and (other := synsets.get(first.opposites[0])):
            answer = f"The opposite of {word} is {other.words[0]}."
            yield word, f"What is the opposite of {word}?", answer
        if len(gloss.split()) >= 4 and rng.random() < 0.35:
            yield word, f"Which word means this: {gloss}?", f"The word is {word}."
        if pos != "n":
            continue
        above = synsets.get(first.parents[0]) if first.parents else None
        kinds = [synsets[k].words[0] for k in children.get(key_of[id(first)], [])]
        if above is not None and rng.random() < 0.5:
            answer = f"{sentence(noun)[:-1]} is a kind of {above.words[0]}: {above.gloss}."
            yield word, f"What kind of thing is {noun}?", answer
        if len(kinds) >= 3 and rng.random() < 0.7:
            some = listing(rng.sample(kinds, min(5, len(kinds))))
            yield word, f"Name some kinds of {word}.", f"Some kinds of {word} are {some}."
        if above is not None and rng.random() < 0.6:
            parts = [f"{sentence(noun)[:-1]} is {gloss}."]
            parts.append(f"It is a kind of {above.words[0]}, which is {above.gloss}.")
            if len(kinds) >= 2:
                parts.append(f"Kinds of {word} include {listing(kinds[:4])}.")
            if others:
                parts.append(f"It is also called {listing(others[:3])}.")
            if first.examples:
                parts.append(f"Here is an example: {sentence(first.examples[0])}")
            yield word, rng.choice([f"Tell me about {word}.", f"Describe {noun}."]), " ".join(parts)
