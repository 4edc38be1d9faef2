"""Texts that exercise tokenizers: code, prose in many languages, emoji, any code point, bad bytes, special tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROSE = (
    "The quick brown fox can't jump over 12 lazy dogs; they're asleep.",
    "Der schnelle Fuchs springt über die faulen Hunde, größer als 3½ m.",
    "L'été dernier, j'ai vu quelque chose d'étrange : un œuf à 2 €.",
    "El niño comió piñas; ¿dónde está la biblioteca? ¡Allí!",
    "A raposa não pulou, porque já é verão e há feijão.",
    "Il perché dell'università è così: più o meno.",
    "De snelle vos springt over één luie hond in 's-Hertogenbosch.",
    "Zażółć gęślą jaźń, proszę pana, o godzinie 7:45.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Pijamalı hasta yağız şoföre çabucak güvendi, İstanbul'da.",
    "Tiếng Việt có đầy đủ dấu và rất nhiều nguyên âm.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, 100 φορές.",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה.",
    "نص حكيم له سر قاطع وذو شأن عظيم ٣٤٥.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा १२३।",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "いろはにほへと、ちりぬるを。漢字と仮名が交じる。",
    "敏捷的棕色狐狸跳过了懒狗。簡體與繁體，１２３。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "ავად თუ კარგად, ყველაფერი გაივლის.",
    "தமிழ் மொழி மிகவும் பழமையானது.",
)
ODD = (
    "😀🙂👩‍👩‍👧‍👦🏽🇩🇪❤️‍🔥 ",
    "\n\r\t \u3000\u00a0\u2028\x85\x1c\v",
    "0123456789٣५Ⅷ½²①",
    "'s't're've'm'll'd'S'ſ",
    "▁Ġ<0x0A>_",
    "e\u0301a\u0308\u200d\ufe0f\ufeff",
)


def varied_texts(count: int, seed: int, special: Sequence[str] = ()) -> Iterator[str]:
    draw = random.Random(seed)
    written = [path.read_text() for path in sorted((ROOT / "edgekit/runtime").glob("*.py"))]
    written += [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    for _ in range(count):
        match draw.randrange(10):
            case 0 | 1 | 2:
                whole = draw.choice(written)
                start = draw.randrange(len(whole))
                yield whole[start : start + draw.randrange(1, 400)]
            case 3 | 4:
                words = [word for text in draw.choices(PROSE, k=3) for word in text.split(" ")]
                yield draw.choice((" ", "  ", "\n")).join(draw.choices(words, k=draw.randrange(1, 30)))
            case 5 | 6:
                yield "".join(draw.choice(draw.choice((*PROSE, *ODD, *ODD))) for _ in range(draw.randrange(1, 60)))
            case 7:
                points = (draw.choice((draw.randrange(0x3000), draw.randrange(0x32000))) for _ in range(30))
                yield "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)
            case 8:
                yield draw.randbytes(draw.randrange(1, 40)).decode("utf-8", "replace")
            case _:
                parts = draw.choices((*special, *special, *PROSE, "\n\n\n", "   "), k=draw.randrange(1, 8))
                yield draw.choice(("", " ", "\n")).join(parts)
