import tinker
from tinker import types

service = tinker.ServiceClient()  # TINKER_BASE_URL and TINKER_API_KEY say where
model = service.create_lora_training_client(base_model="tiny", rank=8).result()
text = list(b"to be, or not to be, that is the question")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(text[:-1]),
    loss_fn_inputs={"target_tokens": text[1:], "weights": [1.0] * len(text[1:])},
)
adam = types.AdamParams(learning_rate=5e-3)
steps = [(model.forward_backward([datum], "cross_entropy"), model.optim_step(adam)) for _ in range(10)]
for call, step in steps:  # all ten are on their way
    loss = call.result().metrics["loss:sum"] / len(text[1:])
    print(f"loss {loss:.3f}, gradient norm {step.result().metrics['grad_norm']:.1f}")
