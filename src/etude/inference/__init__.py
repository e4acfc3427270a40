"""The inference service: continuous batching, latent KV cache, behaviour logprobs, hot-loaded weights."""
