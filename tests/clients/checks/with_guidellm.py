"""guidellm: a benchmark of synthetic chats at a few rates."""

from common import run
from tool import MODEL, ROOT_URL, home, results, run_tool


def measured(*words):
    with home() as folder:
        run_tool(
            *("guidellm", "run", "--backend", f"kind=openai_http,target={ROOT_URL},model=shapes"),
            *(
                "--tokenizer",
                f"kind=hf_auto,model={MODEL}",
                "--data",
                "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            ),
            *("--constraint", "kind=max_requests,count=8", "--output", f"kind=json,path={folder}/found.json"),
            *("--disable-console", *words),
            home=folder,
        )
        found = results(folder, "found.json")["benchmarks"]
    assert found and all(one["requests"]["successful"] and not one["requests"]["errored"] for one in found)


def synchronous():
    measured("--profile", "kind=synchronous")


def concurrent():
    measured("--profile", "kind=concurrent,streams=4")


if __name__ == "__main__":
    run(synchronous, concurrent)
