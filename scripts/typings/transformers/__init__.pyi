# What skerry uses of transformers: pyright would take a quarter of its time to read all that the package exports.
# tests/runtime/test_integrations.py and tests/recipes run with the package itself.

from typing import Any

class TrainingArguments:
    gradient_accumulation_steps: int
    def __init__(self, **settings: Any) -> None: ...

class TrainerState:
    global_step: int
    num_input_tokens_seen: int
    log_history: list[dict[str, Any]]

class TrainerControl:
    should_training_stop: bool
    should_evaluate: bool
    should_save: bool

class TrainerCallback:
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...
    on_step_begin = on_train_begin
    on_pre_optimizer_step = on_train_begin
    on_step_end = on_train_begin
    on_epoch_end = on_train_begin
    on_log = on_train_begin
    on_evaluate = on_train_begin
    on_train_end = on_train_begin

class GPT2Config:
    def __init__(self, **settings: Any) -> None: ...

class GPT2LMHeadModel:
    def __init__(self, config: GPT2Config) -> None: ...

class Trainer:
    def __init__(self, **parts: Any) -> None: ...
    def train(self) -> Any: ...
