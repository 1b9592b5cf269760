"""A byte-level BPE vocabulary of any size, made from nothing: 256 bytes, merges for common words, made-up words."""

from itertools import product

WORDS = """the of and to in is that it was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than first
water been call who oil its now find long down day did get come made may part""".split()

NORMAL, CONTROL = 1, 3  # llama.cpp's token types


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE (GPT-2) writes for each byte value."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    code = {b: b for b in shown} | {b: 256 + i for i, b in enumerate(hidden)}
    return [chr(code[b]) for b in range(256)]


def word_merges(space: str):
    """Merges, left to right, that put each common word together, with and without a space before it."""
    merges = {}
    for word in WORDS:
        for text in (word, space + word):
            for end in range(2, len(text) + 1):
                merges.setdefault((text[: end - 1], text[end - 1]), None)
    return list(merges)


def made_up_words(space: str):
    """Words that no merge reaches: they fill a vocabulary up, and what a random model writes can be read aloud."""
    syllables = [c + v for c, v in product("bdfghjklmnprstvwyz", "aeiou")]
    for n in range(2, 6):
        for parts in product(syllables, repeat=n):
            yield space + "".join(parts)


def build(n_vocab: int):
    """Tokens, their types and the merges. The last token is `<|endoftext|>`."""
    letters = byte_letters()
    space = letters[ord(" ")]
    tokens = dict.fromkeys(letters)
    merges = []
    for left, right in word_merges(space):
        if len(tokens) + 1 >= n_vocab:
            break
        tokens.setdefault(left + right)
        merges.append(f"{left} {right}")
    if n_vocab < len(letters) + 1:
        raise ValueError(f"a vocabulary needs at least {len(letters) + 1} tokens")
    fill = made_up_words(space)
    while len(tokens) + 1 < n_vocab:
        tokens.setdefault(next(fill))
    return [*tokens, "<|endoftext|>"], [NORMAL] * len(tokens) + [CONTROL], merges
