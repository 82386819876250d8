"""A load generator for any OpenAI-style server, and the analysis of its results. Others import from its sub-packages.

`sources`: what is sent, and when; `client`: sends it; `deployments`: the servers that are started to be measured;
`results`: the figures; `measuring`: `bench`, `bench compare` and `trace`; `output`: what people see. Speaks HTTP only,
so that it measures any OpenAI-style server: judges by what arrived and when, never imports the engine.
"""
