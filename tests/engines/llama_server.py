"""llama.cpp's server as a program, from the build of it in the package xllamacpp, with the options that tests need."""

import argparse
import os
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser("llama-server")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("--lora-init-without-apply", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=4)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = options.model, [options.host], options.port
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in options.lora]
    params.lora_init_without_apply = options.lora_init_without_apply
    params.n_ctx, params.n_parallel = options.ctx_size, options.parallel
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # as --cache-type-k f32 …
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
