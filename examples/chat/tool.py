"""Two turns: the agent looks up a price with a tool, and answers with it.

Each task is a shop with prices of its own, which no prompt contains: without the tool
there is nothing to learn them from. The items of held-out tasks are not trained on.
"""

import random
import re
from typing import Literal

from rollweave import Message, Score, Split, Tool, converse, mix, new_task, payload_of
from rollweave.envs.handlers.tools import text_call_instructions

ITEMS = re.findall(
    r"\w+",
    """apple bag ball banana basket bell belt blanket book bottle bowl box bread broom
brush bucket button cake camera candle cap card carpet chair cheese clock coat cup curtain
desk dish doll door drum egg fan flag fork glass glove guitar hammer hat jacket jar kettle
key kite knife ladder lamp lemon map mirror mug nail needle onion orange oven pan pear pen
pencil piano pillow pipe plate pot purse radio ring robe rope rug ruler saw scarf shirt
shoe soap sock sofa spoon stove table tent tie towel train truck umbrella vase violin
watch wheel whistle window""",
)

ABOUT = "You answer questions about prices in a shop, with the price alone."
EXAMPLE = ("What is the price of the ship?", "```price\nship\n```", "381", "381")
"""With `calls = "text"`, the conversation that the agent sees first: small models call
no tool that they have not seen called.
"""


class Prices:
    """`calls` is "native" for a model whose chat template shows tools, and "text" for
    others: the system message then says how a tool is called.
    """

    def __init__(self, *, calls: Literal["native", "text"] = "native") -> None:
        self.calls = calls

    async def init(self, job):
        self.item, self.shop = payload_of(job.task)["item"], payload_of(job.task)["shop"]
        self.asked = self.answer = ""

    def price(self, item):
        return str(100 + mix(self.shop, item) % 900)

    async def look_up(self, arguments):
        self.asked = arguments["item"].strip().lower()
        return self.price(self.asked)

    async def run(self, agent):
        item = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
        tool = Tool(
            name="price", description="the price of an item", parameters=item, call=self.look_up
        )
        first = [Message(role="system", content=ABOUT)]
        if self.calls == "text":
            about = f"{ABOUT}\n{text_call_instructions([tool])}"
            roles = ("system", "user", "assistant", "user", "assistant")
            texts = (about, *EXAMPLE)
            first = [
                Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)
            ]
        question = Message(role="user", content=f"What is the price of the {self.item}?")
        said = await converse(agent, [*first, question], [tool], calls=self.calls)
        self.answer = said[-1].content

    async def eval(self):
        """Give a fifth of the reward for the right call, and all for the price."""
        right = re.findall(r"\d+", self.answer)[-1:] == [self.price(self.item)]
        return Score(reward=1.0 if right else 0.2 * (self.asked == self.item), success=right)

    @classmethod
    def make_task(cls, *, index, seed, split, options):
        rng = random.Random(mix(seed, split, index))
        held_out = split is not Split.TRAIN
        items = [item for number, item in enumerate(ITEMS) if (number % 4 == 0) is held_out]
        return new_task(item=rng.choice(items), shop=rng.getrandbits(32))
