"""A chat in the terminal that shows text as it is written. Ctrl-C stops an answer, Ctrl-D ends the chat.

python -m examples.stream_chat my.edgekit
"""

from __future__ import annotations

import sys

import edgekit
from edgekit.errors import ContextExceeded

Messages = list[dict[str, str]]


def answer(runtime: edgekit.Runtime, messages: Messages) -> str:
    """Print the answer to `messages` piece by piece; return it. Ctrl-C keeps what was written so far."""
    text = ""
    with runtime.stream(messages, max_tokens=300, temperature=0.7, repetition_penalty=1.1) as stream:
        try:
            for piece in stream:
                print(piece.text, end="", flush=True)
                text += piece.text
        except KeyboardInterrupt:
            print(" [stopped]", end="")
    print()
    return text


def chat(runtime: edgekit.Runtime, system: str = "You are a helpful assistant.") -> Messages:
    """Read questions from the terminal until it ends; return the conversation.

    Each turn sends the whole conversation. The runtime keeps what it computed for the earlier turns, so only the new
    message is processed.
    """
    messages: Messages = [{"role": "system", "content": system}]
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return messages
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        try:
            messages.append({"role": "assistant", "content": answer(runtime, messages)})
        except ContextExceeded:
            messages[1:3] = []  # forget the oldest question and its answer, and ask again
            messages.pop()
            print("The conversation is full; its beginning was forgotten. Ask again.")


if __name__ == "__main__":
    with edgekit.open(sys.argv[1]) as opened:
        chat(opened)
