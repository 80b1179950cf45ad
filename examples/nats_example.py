import asyncio
import os

from bus.client import LoraConfig, connect, datum

TEXT = list(b"to be, or not to be, that is the question")


async def main() -> None:
    url, password = os.environ["TINKERBUS_NATS_URL"], os.environ["TINKERBUS_NATS_PASSWORD"]
    async with await connect(url, tenant="default", password=password) as client:
        model = await client.create_model(f"hamlet-{os.getpid()}", base_model="tiny", lora=LoraConfig(rank=8))
        data = [datum(TEXT[:-1], target_tokens=TEXT[1:], weights=[1.0] * len(TEXT[1:]))]
        for _ in range(10):
            call = await model.forward_backward(data)  # stored by the broker, not yet run
            step = await model.optim_step(learning_rate=5e-3)
            print(f"loss {(await call).metrics['loss:sum']:.1f}, step {(await step).metrics['step']:.0f}")
        await model.unload()


asyncio.run(main())
