"""A replica in the Trainer of transformers: a tiny GPT-2 learns to count. Replace model and data by yours."""

import torch
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from skerry.runtime.integrations.hf import DiLoCoCallback
from skerry.runtime.replica import connect


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 16 numbers, each with another first one."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        numbers = (place * 7 + torch.arange(16)) % 64
        return {"input_ids": numbers, "labels": numbers}


with connect() as replica:
    data = Counting()
    held_out = range(0, len(data), 16)  # no replica trains on these
    training = [place for place in range(len(data)) if place not in held_out]
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=f"output-{replica.slot}",
            max_steps=replica.total_steps or 10_000,  # also the length of the schedule; the run decides when it ends
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            logging_steps=20,
            save_strategy="no",  # the run has its own checkpoints
            eval_strategy="steps" if replica.index == 0 else "no",  # one replica is enough
            eval_steps=5 * replica.run.sync_every,  # right after a round, on the shared parameters
            data_seed=replica.index,
            include_num_input_tokens_seen="all",  # tokens for `skerry status`, and for outer.weighting
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=Subset(data, replica.shard(training)),
        eval_dataset=Subset(data, held_out[:64]),
        callbacks=[DiLoCoCallback(replica)],  # also records the eval_loss, for `skerry report`
    )
    trainer.train()  # `skerry export` writes the trained parameters to a file
