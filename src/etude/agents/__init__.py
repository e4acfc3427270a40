"""The harness: prompt, tools, turn loop, self-summary chain, scripted agents. Sees a Sampler and a Pod, never a service."""
