"""A load generator for any OpenAI-style server, and the analysis of its results. Others import from its sub-packages.

`sources`: what is sent, and when; `client`: sends requests; `deployments`: servers that are started to be measured;
`results`: the figures; `measuring`: `bench`, `bench compare` and `trace`; `output`: what people see. Speaks only HTTP
and judges by what arrived and when, so it can measure any OpenAI-style server. Never imports the engine.
"""
