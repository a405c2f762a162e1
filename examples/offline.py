"""Answer a few prompts without a server, on the demo model: `python examples/offline.py`."""

import rimuru
from rimuru.demo import ensure_demo


def main() -> None:
    llm = rimuru.LLM(str(ensure_demo()), device_memory="800MB", max_model_len=512, max_num_batched_tokens=256)
    params = rimuru.SamplingParams(temperature=0, max_tokens=40)
    questions = ["Name the capital of France.", "Why is the sky blue?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    for question, answer in zip(questions, llm.chat(chats, params), strict=True):
        print(f"> {question}\n{answer.outputs[0].text}\n")


if __name__ == "__main__":
    main()
