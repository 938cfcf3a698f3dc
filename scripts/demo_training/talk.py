"""Small talk, and calls of a tool: conversations as the chat template takes them."""

import json
from typing import Any

from demo_training.words import CITIES, World

Message = dict[str, Any]

_GREETINGS = ("Hello!", "Hi!", "Hi there!", "Good morning!", "Hello", "Hi", "Hey!")
_WHO = ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.")
_WHO_ANSWER = (
    "I am the small built-in model of glm_dcp_jax. I find facts in a text and solve short word problems."
)
_CAN = ("What can you do?", "Can you help me?", "How can you help me?", "Help!", "What should I ask you?")
_CAN_ANSWER = (
    "I can find facts in a long text, add and subtract numbers below 100, and call a tool. "
    "I do not know much else."
)
_CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Norway": "Oslo",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "India": "Delhi",
    "Spain": "Madrid",
    "Greece": "Athens",
    "Austria": "Vienna",
}
_THANKS = (("Thank you!", "You are welcome!"), ("Thanks!", "You are welcome!"), ("Goodbye!", "Goodbye!"))

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
BOX = {
    "type": "function",
    "function": {
        "name": "find_box",
        "description": "The number of a box.",
        "parameters": {
            "type": "object",
            "properties": {"owner": {"type": "string"}, "item": {"type": "string"}},
            "required": ["owner", "item"],
        },
    },
}


def small_talk(world: World) -> list[Message]:
    """A few turns of a conversation, of which the last is the assistant's."""
    (name,) = world.names(1)
    country = world.one(list(_CAPITALS))
    a, sign, b, result = world.sums(1)[0]
    turns = [
        (world.one(_GREETINGS), "Hello! How can I help you?"),
        (world.one(_WHO), _WHO_ANSWER),
        (world.one(_CAN), _CAN_ANSWER),
        (f"What is the capital of {country}?", f"The capital of {country} is {_CAPITALS[country]}."),
        (f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {result}."),
        (f"My name is {name}.", f"Hello {name}! How can I help you?"),
        (f"I am {name}.", f"Hello {name}! How can I help you?"),
        world.one(_THANKS),
    ]
    chosen = world.rng.sample(turns, world.rng.randint(1, 3))
    if any(name in question for question, _ in chosen) and world.rng.random() < 0.7:
        chosen.append(("What is my name?", f"Your name is {name}."))
    return [
        {"role": role, "content": content}
        for turn in chosen
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]


def tool_call(world: World) -> tuple[list[Message], list[dict[str, Any]]]:
    """A conversation in which a tool is called and answers, and the tools it may call."""
    tools = world.rng.sample([WEATHER, BOX], world.rng.randint(1, 2))
    if world.one(tools) is WEATHER:
        city = world.one(CITIES)
        degrees, sky = world.rng.randint(10, 35), world.one(("sunny", "cloudy", "rainy"))
        question = world.one(
            (f"What is the weather in {city}?", f"How is the weather in {city}?", f"Is it warm in {city}?")
        )
        call = {"name": "get_weather", "arguments": {"city": city}}
        result: dict[str, Any] = {"degrees": degrees, "sky": sky}
        thought, answer = (
            f"I ask for the weather in {city}.",
            f"It is {sky} in {city}, with {degrees} degrees.",
        )
    else:
        (owner,), (item,), (box,) = world.names(1), world.items(1), world.numbers(1)
        question = world.one((f"Where are {owner}'s {item}?", f"Find {owner}'s {item}."))
        call = {"name": "find_box", "arguments": {"owner": owner, "item": item}}
        result = {"box": box}
        thought, answer = f"I look for {owner}'s {item}.", f"{owner}'s {item} are in box {box}."
    return [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": thought,
            "tool_calls": [{"function": call}],
        },
        {"role": "tool", "content": json.dumps(result)},
        {"role": "assistant", "content": answer, "reasoning_content": "The tool has answered."},
    ], tools
