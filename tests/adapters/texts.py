# ruff: noqa: RUF001  strange letters are the point of this file
"""Texts to hold one tokenizer against another: by hand where it hurts, by chance for the rest."""

import random

HARD = (
    "",
    " ",
    "\n",
    "\r\n\r\n",
    "a  b   c    d",
    "   leading and trailing   ",
    "\t\tdef f(x):\n\t\treturn x  # done\n\n\n",
    "I'm you're he'd WE'LL they'Ve",
    "3.14159 1,000,000 007 ١٢٣ Ⅷ ½ x²",
    "naïve café e\u0301 \u212b \ufb01 ﷺ",
    "你好，世界。日本語テスト 한국어 조합형 \u1112\u1161\u11ab",
    "👩🏽\u200d🚀 🇩🇪 😀😃 🏳️\u200d🌈",
    "مرحبا بالعالم שלום हिन्दी ไทย ქართული",
    "\u00a0non\u2003breaking\u3000spaces\u2028here\u0085",
    "\ufeffBOM \u200b zero \u200d width \ufffd broken",
    "<html lang='de'>&amp;</html> {{ x }} {% y %}",
    "https://example.org/?q=%20a+b&c=d#e",
    "for(int i=0;i<10;++i){a[i]^=~b[i]>>2;}",
    "SELECT * FROM t WHERE a<>'b'; -- c",
    "∑∫√∞≠≤≥ αβγδ ℝ𝔸𝕏 ㎏",
    "\x00\x01\x1b[31m\x7f",
    "a" * 300,
    " " * 300 + "x",
    "\n" * 100,
    "ab" * 200 + "é" * 100,
    "𝒜" * 50,
)
POOLS = (
    "abcdefghijklmnopqrstuvwxyz ",
    "ABC def GHI 'll 've 're ",
    "0123456789 .,-",
    " \t\n\r\u00a0\u3000",
    "你好世界日本語한국",
    "😀👩🏽\u200d🚀🇩🇪",
    "éüñßøÅ\u0301\u0308e",
    "{}[]();=<>/*+-_#\\\"'`|~^%$@!?:",
    "مرحبا עברית हिन्दी ไทย",
)
WORDS = ("return", "import", "the", "ing", "ung", "Straße", "function", "l'été", "==", "..", "\n\n")


def varied(count: int, *, marks: tuple[str, ...] = (), seed: int = 0) -> list[str]:
    """Return this many texts: the hard ones, then mixtures; in some stand special tokens."""
    rng = random.Random(seed)
    made = list(HARD)
    made += [f"x{mark}y {mark}{mark}\n" for mark in marks]
    while len(made) < count:
        pools = rng.sample(POOLS, rng.randint(1, 3))
        parts = [rng.choice(rng.choice(pools)) for _ in range(rng.randrange(1, 70))]
        for _ in range(rng.randrange(3)):
            parts.insert(rng.randrange(len(parts)), rng.choice(WORDS))
        if marks and rng.random() < 0.2:
            parts.insert(rng.randrange(len(parts)), rng.choice(marks))
        made.append("".join(parts))
    return made
