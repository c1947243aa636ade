"""Keep libraries from talking over our own messages; nothing heavy is imported before a function is called."""


def quieten_libraries() -> None:
    """Keep the libraries' advice out of our own messages."""
    import logging

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)


def hide_loading_bars() -> None:
    """Hide the bars of reading weights, a second each; downloads keep theirs."""
    from diffusers.utils import logging as diffusers_logging
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    had_download_bars = not are_progress_bars_disabled()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()  # hides downloads too
    if had_download_bars:
        enable_progress_bars()
