"""Checks that prompt and output fit the model's window, and words the refusal. Pure.

litellm and LangChain recognise by its words that a longer window would help. The first sentence has
the words that both look for; the second is vLLM's.
"""


def over_window(num_prompt: int, max_tokens: int, window: int) -> str | None:
    """Why `num_prompt` tokens and `max_tokens` after them do not fit, or None."""
    if num_prompt >= window:
        return prompt_too_long(str(num_prompt), window)
    total = num_prompt + max_tokens
    if total <= window:
        return None
    return (
        f"This model's maximum context length is {window} tokens. However, you requested "
        f"{max_tokens} output tokens and your prompt contains at least {num_prompt} input tokens, "
        f"for a total of at least {total} tokens. Please reduce the length of the input prompt or "
        "the number of requested output tokens."
    )


def prompt_too_long(num_prompt: str, window: int) -> str:
    """The sentence for a prompt that leaves no room for a token."""
    return (
        f"the prompt is too long: this model's maximum context length is {window} tokens, "
        f"and it has {num_prompt}"
    )
