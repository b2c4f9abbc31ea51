"""Stand-in: a script that trains a tiny vision-language model through `mindspeed_mm.training`."""

from copy import deepcopy

from megatron.core import parallel_state
from megatron.training import get_args
from mindspeed_mm.configs.config import mm_extra_args_provider
from mindspeed_mm.training import pretrain
from torch import nn
from torch.nn import functional

SETTINGS = ("recompute_granularity", "recompute_method", "recompute_num_layers")


class Layer(nn.Module):
    def __init__(self, width, ffn):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, hidden):
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config.hidden_size, config.ffn_hidden_size) for _ in range(config.num_layers))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Tower(nn.Module):
    def __init__(self, config):
        super().__init__()
        features = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = nn.Linear(features, config.hidden_size)
        self.blocks = Block(config)

    def forward(self, pixels):
        return self.blocks(self.patch_embed(pixels))


class Vision(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.encoder = Tower(config.vision_encoder)
        self.projector = nn.Linear(4 * config.vision_encoder.hidden_size, config.vision_projector.hidden_size)
        self.post_process = True

    def forward(self, pixels):
        return self.projector(self.encoder(pixels).reshape(-1, self.projector.in_features))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.decoder = Block(config)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class VLMModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.image_token = config.img_context_token_id
        self.image_encoder = Vision(config.image_encoder)
        self.text_decoder = Decoder(config.text_decoder)
        self.add_image_encoder = True

    def forward(self, input_ids, labels, attention_mask, pixel_values, image_grid_thw):
        assert attention_mask.shape == input_ids.shape
        assert int(image_grid_thw.prod(dim=1).sum()) == len(pixel_values)
        images = self.image_encoder(pixel_values)
        hidden = self.text_decoder.embedding(input_ids)
        places = input_ids == self.image_token
        hidden = hidden.masked_scatter(places.unsqueeze(-1), images)
        logits = self.text_decoder.output_layer(self.text_decoder.decoder(hidden)).float()
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss_dict": {"loss": loss}}


def model_provider(pre_process=True, post_process=True):
    config = deepcopy(get_args().mm.model)
    parts = {"vision": config.image_encoder.vision_encoder, "text": config.text_decoder}
    stage, chunk = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_virtual_pipeline_model_parallel_rank(),
    )
    model = VLMModel(config)
    model.built = {
        "stage": stage,
        "chunk": chunk,
        "layers": {name: part.pipeline_num_layers for name, part in parts.items()},
        "recompute": {name: [getattr(part, key, None) for key in SETTINGS] for name, part in parts.items()},
    }
    model.image_encoder.requires_grad_(not config.image_encoder.vision_encoder.freeze)
    return model


def loss_func(output):
    return output["loss_dict"]["loss"].unsqueeze(0), {}


def forward_step(data_iterator, model):
    assert model.module.module.add_image_encoder
    return model(**next(data_iterator)), loss_func


if __name__ == "__main__":
    pretrain(None, model_provider, None, forward_step, extra_args_provider=mm_extra_args_provider, args_defaults={})
