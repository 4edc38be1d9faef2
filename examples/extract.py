"""Turn free text into a checked pydantic object. Needs `pip install 'edgekit[structured]'`.

python -m examples.extract my.edgekit "Order 1423: two kilos of coffee for Ada, by Friday, please."
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import BaseModel, Field

import edgekit


class Order(BaseModel):
    """An order, as the app needs it. Bounds on text and numbers also bound the length of the answer."""

    number: Annotated[int, Field(ge=0, le=999_999)]
    customer: Annotated[str, Field(max_length=40)]
    unit: Literal["kg", "piece", "box"]
    amount: Annotated[int, Field(ge=1, le=999)]


def extract(runtime: edgekit.Runtime, text: str) -> Order:
    """Return the order in `text`. The schema makes every answer an `Order`; its values may still be wrong.

    Raises `InvalidAnswer` if the answer was cut off after `max_tokens`.
    """
    messages = [
        {"role": "system", "content": "Write the order as JSON."},
        {"role": "user", "content": text},
    ]
    order: Order = runtime.chat(messages, schema=Order, max_tokens=200).parsed
    return order


if __name__ == "__main__":
    with edgekit.open(sys.argv[1]) as opened:
        print(extract(opened, sys.argv[2]).model_dump_json(indent=1))
