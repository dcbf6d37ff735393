"""Options of `pruned-server`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal
from urllib.parse import urlsplit

from lmeval_prune.config import Count, Settings
from lmeval_prune.errors import InputError


@dataclass(frozen=True)
class ServerOptions(Settings):
    """The model_args of `pruned-server`, except those that select the variant (see `Arguments`)."""

    # server
    base_url: str | None = None  # address of the server, e.g. `http://localhost:8000`
    server: Literal["vllm", "sglang", "llamacpp"] = "vllm"  # its kind
    num_concurrent: Count = 64  # requests at a time
    max_retries: Count = 8  # times that a request is sent, at most
    timeout: Count = 600  # seconds for a request and its complete response
    probe: bool = True  # check at the start that the server has the variants
    verify_certificate: bool = True
    ca_cert_path: str | None = None
    auth_token: str | None = None
    header: Any = None
    # model
    model: str | None = None  # name of the unpruned model on the server; default: the only model that it lists
    pretrained: str | None = None  # the same model, for its configuration and tokenizer; default `tokenizer`, `model`
    revision: str | None = None
    trust_remote_code: bool = False
    adapters: str | None = None  # folder that `lmeval-prune export adapter` wrote; answers depend on its content
    lora: str | None = None  # ordinary LoRA adapter, a folder; the server has it under the folder's name
    dtype: str | None = None  # type in which the server computes; required with `responses=`, or named by `adapters`
    max_length: Count | None = None  # tokens of prompt and answer; at most the server's limit
    # prompts and answers, as for lm-eval's `local-completions` and `hf`
    tokenizer: str | None = None
    use_fast_tokenizer: bool = True
    add_bos_token: bool | None = None
    eos_string: str | None = None
    custom_prefix_token_id: int | None = None
    enable_thinking: bool | None = None  # argument of the chat template
    chat_template_args: Any = None  # further arguments of the chat template
    think_end_token: str | None = None  # text that ends a model's thoughts, which are removed from the answer
    max_gen_toks: Count | None = None
    seed: int = 1234  # sampled try i uses a seed derived from `seed` and i
    # ignored; lm-eval passes them
    batch_size: Any = None
    max_batch_size: Any = None
    device: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base_url:
            raise InputError("name a server: --model_args base_url=http://HOST:PORT")
        if self.think_end_token and self.think_end_token.isdigit():  # no answer of a server has a number in its place
            raise InputError(f"think_end_token={self.think_end_token} is a number; give the token's text")

    @property
    def url(self) -> str:
        """Return the server's address without a path of the API."""
        address = urlsplit(str(self.base_url).strip())
        path = re.sub(r"(/v1)?(/(chat/)?completions)?/*$", "", address.path)
        return f"{address.scheme}://{address.netloc}{path}"

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments of the chat template."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**(self.chat_template_args or {}), **thinking}

    @property
    def api_options(self) -> dict[str, Any]:
        """Return the options that lm-eval's own class takes, as they are, except those left at None."""
        names = ["trust_remote_code", "revision", "use_fast_tokenizer", "custom_prefix_token_id", "eos_string", "seed"]
        names += ["auth_token", "header", "verify_certificate", "max_gen_toks", "num_concurrent", "max_retries"]
        return {name: getattr(self, name) for name in [*names, "timeout"] if getattr(self, name) is not None}

    @property
    def answer_options(self) -> dict[str, Any]:
        """Return the options that answers depend on, except those left at None."""
        names = ("max_gen_toks", "add_bos_token", "eos_string", "custom_prefix_token_id", "think_end_token")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return options | ({"template": self.template_arguments} if self.template_arguments else {})


SERVER_OPTIONS = {field.name for field in fields(ServerOptions)}
# options that no local model has
SERVER_ARGUMENTS = {
    *("base_url", "server", "num_concurrent", "max_retries", "timeout", "probe", "model", "adapters", "lora", "seed"),
    *("verify_certificate", "ca_cert_path", "auth_token", "header"),
}


def without_server(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model_args that describe a model, without those that describe the server of a served model."""
    is_served = "base_url" in arguments
    return {name: value for name, value in arguments.items() if not is_served or name not in SERVER_ARGUMENTS}
