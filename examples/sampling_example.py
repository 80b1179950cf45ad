import tinker
from tinker import types

service = tinker.ServiceClient()  # TINKER_BASE_URL and TINKER_API_KEY say where
model = service.create_lora_training_client(base_model="tiny", rank=8).result()
saved = model.save_state("before").result()  # weights, optimizer, counters
sampler = model.save_weights_and_get_sampling_client().result()  # frozen, whatever the model does next
prompt = types.ModelInput.from_ints(list(b"to be, or not"))
wanted = types.SamplingParams(max_tokens=8, temperature=0.7, seed=1)
answer = sampler.sample(prompt, num_samples=2, sampling_params=wanted).result()
for sequence in answer.sequences:
    print(sequence.tokens, [round(logprob, 2) for logprob in sequence.logprobs])
again = service.create_training_client_from_state_with_optimizer(saved.path).result()
print(f"{saved.path} goes on as {again.model_id}")
