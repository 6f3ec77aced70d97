"""The public architectures that must train as in plain PyTorch.

One row each: family, class, batches, and the fields that its configuration needs in addition to
:data:`zoo_build.TINY`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import zoo_batches as b
from torch import nn
from zoo_build import timm_model, torchvision_model, transformers_model


@dataclass(frozen=True)
class Model:
    """``build()`` makes the model; ``batch(config, generator)`` the arguments of one forward."""

    family: str
    build: Callable[[], nn.Module]
    batch: b.MakeBatch


def _transformers(family: str, cls: str, batch: b.MakeBatch, **given: Any) -> tuple[str, Model]:
    return cls, Model(family, partial(transformers_model, cls, **given), batch)


def _timm(name: str, size: int = 32, **given: Any) -> tuple[str, Model]:
    return f"timm {name}", Model("timm", partial(timm_model, name, **given), b.images(size))


def _torchvision(factory: str, batch: b.MakeBatch, **given: Any) -> tuple[str, Model]:
    return f"torchvision {factory}", Model(
        "torchvision", partial(torchvision_model, factory, **given), batch
    )


# ------------------------------------------------------------------ what several rows need

_FOUR_STAGES = {
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 2, 2],
    "sr_ratios": [2, 2, 1, 1],
    "decoder_hidden_size": 16,
}
_WINDOWS = {
    "image_size": 32,
    "patch_size": 4,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 2,
    "drop_path_rate": 0.0,
}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_RT_RESNET = {
    **_RESNET,
    "model_type": "rt_detr_resnet",
    "out_features": ["stage2", "stage3", "stage4"],
}
_RT_DETR = {
    "backbone_config": _RT_RESNET,
    "encoder_in_channels": [8, 16, 16],
    "decoder_in_channels": [16, 16, 16],
    "num_denoising": 0,
    "num_labels": 2,
}
_SWIN = {
    "model_type": "swin",
    **_WINDOWS,
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_WAVE = {
    "conv_dim": [16, 16],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.2,  # masked in place
    "mask_time_length": 2,
    "mask_time_min_masks": 1,
    "vocab_size": 32,
}
_LOW_RANK = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_DEEPSEEK = {
    **_LOW_RANK,
    "head_dim": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_MAMBA_HEADS = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_chunk_size": 4,
}
_CODEC = {"num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16}
_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 3, 4],
    "num_time_features": 1,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# ------------------------------------------------------------------ the table

_text = partial(_transformers, "text")
_experts = partial(_transformers, "experts")
_recurrent = partial(_transformers, "state space")
_translating = partial(_transformers, "encoder-decoder")
_vision = partial(_transformers, "vision")
_detection = partial(_transformers, "detection")
_audio = partial(_transformers, "audio")
_several = partial(_transformers, "multimodal")
_time = partial(_transformers, "time series")

MODELS: Mapping[str, Model] = dict([
    # encoders and decoders of text
    _text("BertForMaskedLM", b.language),
    _text("ElectraForPreTraining", b.token_classes),
    _text("AlbertForMaskedLM", b.language, num_hidden_groups=1),
    _text("DebertaV2ForMaskedLM", b.language, relative_attention=True, position_buckets=4,
          pos_att_type=["p2c", "c2p"], conv_kernel_size=3),
    _text("ModernBertForMaskedLM", b.language),
    _text("RoCBertForMaskedLM", b.language, pronunciation_vocab_size=8, shape_vocab_size=8,
          pronunciation_embed_dim=8, shape_embed_dim=8),
    _text("LongformerForMaskedLM", b.language, attention_window=[4, 4]),
    _text("FunnelForMaskedLM", b.language, block_sizes=[1, 1], num_decoder_layers=1),
    _text("XLNetLMHeadModel", b.language, d_inner=24),
    _text("XLMWithLMHeadModel", b.language),
    _text("CanineForSequenceClassification", b.text_class, num_hash_buckets=16,
          local_transformer_stride=4, downsampling_rate=4),
    _text("PerceiverForMaskedLM", b.perceived, d_latents=16, num_latents=4, num_blocks=1,
          num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2,
          max_position_embeddings=6, qk_channels=16, v_channels=16),
    _text("LlamaForCausalLM", b.language),
    _text("Gemma2ForCausalLM", b.language),
    _text("GPT2LMHeadModel", b.language),
    _text("BloomForCausalLM", b.language),
    _text("OPTForCausalLM", b.language),
    _text("FalconForCausalLM", b.language),
    _text("MptForCausalLM", b.language),
    _text("MiniCPM3ForCausalLM", b.language, **_LOW_RANK),
    # mixtures of experts
    _experts("MixtralForCausalLM", b.language),
    _experts("Qwen2MoeForCausalLM", b.language),
    _experts("DbrxForCausalLM", b.language,
             ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
             attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}),
    _experts("JetMoeForCausalLM", b.language, kv_channels=8),
    _experts("DeepseekV3ForCausalLM", b.language, **_DEEPSEEK),
    _experts("GptOssForCausalLM", b.language),
    _experts("SwitchTransformersForConditionalGeneration", b.translation, decoder_start_token_id=0),
    _experts("NllbMoeForConditionalGeneration", b.translation, encoder_sparse_step=2,
             decoder_sparse_step=2, expert_capacity=8),
    # state spaces and other recurrences
    _recurrent("MambaForCausalLM", b.language, state_size=4),
    _recurrent("Mamba2ForCausalLM", b.language, state_size=4, num_heads=4, head_dim=8, n_groups=1,
               chunk_size=4),
    _recurrent("JambaForCausalLM", b.language, mamba_d_state=4, attn_layer_period=2,
               attn_layer_offset=1),
    _recurrent("Zamba2ForCausalLM", b.language, mamba_d_state=4, num_hidden_layers=3,
               layers_block_type=["mamba", "hybrid", "hybrid"], n_mamba_heads=4, chunk_size=4,
               num_mem_blocks=1, use_shared_attention_adapter=True, adapter_rank=4),
    _recurrent("RecurrentGemmaForCausalLM", b.language, block_types=["recurrent", "attention"],
               attention_window_size=8),
    _recurrent("RwkvForCausalLM", b.unpadded, attention_hidden_size=16),
    _recurrent("FalconH1ForCausalLM", b.language, mamba_d_ssm=32, **_MAMBA_HEADS),
    _recurrent("Qwen3NextForCausalLM", b.language, linear_num_value_heads=2, linear_num_key_heads=2,
               linear_key_head_dim=8, linear_value_head_dim=8,
               layer_types=["linear_attention", "full_attention"]),
    # encoders with decoders
    _translating("T5ForConditionalGeneration", b.translation, decoder_start_token_id=0),
    _translating("BartForConditionalGeneration", b.translation),
    _translating("LEDForConditionalGeneration", b.translation, attention_window=4,
                 max_encoder_position_embeddings=32, max_decoder_position_embeddings=32),
    _translating("PegasusXForConditionalGeneration", b.translation, block_size=4,
                 num_global_tokens=2),
    _translating("ProphetNetForConditionalGeneration", b.translation, num_encoder_layers=1,
                 num_decoder_layers=1, ngram=2),
    _translating("FSMTForConditionalGeneration", b.translation_of_one_length, src_vocab_size=48,
                 tgt_vocab_size=48, langs=["a", "b"]),
    _translating("T5GemmaForConditionalGeneration", b.translation,
                 encoder={"model_type": "t5_gemma_module"},
                 decoder={"model_type": "t5_gemma_module"}),
    # images, video, depth
    _vision("ViTForImageClassification", b.image_class()),
    _vision("ViTMAEForPreTraining", b.pixels()),
    _vision("BeitForImageClassification", b.image_class()),
    _vision("Dinov2ForImageClassification", b.image_class()),
    _vision("SwinForImageClassification", b.image_class(32), **_WINDOWS),
    _vision("ConvNextForImageClassification", b.image_class(32), hidden_sizes=[8, 16],
            depths=[1, 1], num_stages=2),
    _vision("ResNetForImageClassification", b.image_class(32), embedding_size=8,
            hidden_sizes=[8, 16], depths=[1, 1]),
    _vision("MobileViTForImageClassification", b.image_class(32), image_size=32, patch_size=2,
            hidden_sizes=[16, 16, 16], neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16]),
    _vision("LevitForImageClassification", b.image_class(64), image_size=64, patch_size=16,
            hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1],
            key_dim=[4, 4, 4], attention_ratio=[1, 1, 1], mlp_ratio=[1, 1, 1]),
    _vision("PoolFormerForImageClassification", b.image_class(32), depths=[1, 1, 1, 1],
            hidden_sizes=[8, 8, 8, 8]),
    _vision("SegformerForSemanticSegmentation", b.segmentation(), **_FOUR_STAGES),
    _vision("DPTForDepthEstimation", b.pixels(), patch_size=4, num_hidden_layers=4,
            neck_hidden_sizes=[4, 4, 8, 8], fusion_hidden_size=8,
            backbone_out_indices=[0, 1, 2, 3], backbone_config=None, is_hybrid=False,
            neck_ignore_stages=[]),
    _vision("VideoMAEForVideoClassification", b.video_class, num_frames=2, tubelet_size=2),
    _vision("SamModel", b.pointed,
            vision_config={"output_channels": 16, "num_pos_feats": 8, "patch_size": 4,
                           "window_size": 2, "mlp_dim": 24, "global_attn_indexes": [1]},
            prompt_encoder_config={"patch_size": 4, "mask_input_channels": 4},
            mask_decoder_config={"mlp_dim": 24, "iou_head_hidden_dim": 16,
                                 "attention_downsample_rate": 2}),
    # detection
    _detection("DetrForObjectDetection", b.pixels(32), backbone_config=_RESNET, num_labels=2),
    _detection("DeformableDetrForObjectDetection", b.pixels(32), d_model=32, num_labels=2,
               backbone_config=_RT_RESNET | {"model_type": "resnet"}),
    _detection("YolosForObjectDetection", b.pixels(), num_detection_tokens=5, num_labels=2,
               image_size=[16, 16]),
    _detection("RTDetrForObjectDetection", b.pixels(32), **_RT_DETR),
    _detection("MaskFormerModel", b.pixels(32), backbone_config=_SWIN, fpn_feature_size=32,
               mask_feature_size=32, decoder_config={"model_type": "detr", "d_model": 32}),
    _detection("OwlViTForObjectDetection", b.image_and_text()),
    _detection("GroundingDinoForObjectDetection", b.grounded, d_model=32,
               text_config={"model_type": "bert", "vocab_size": 104},
               # with stage4 the last convolution sees one pixel: torch's bf16 gradient of it varies
               backbone_config=_SWIN | {"out_features": ["stage1", "stage2", "stage3"]}),
    # sound
    _audio("Wav2Vec2ForCTC", b.spoken(), **_WAVE),
    _audio("HubertForCTC", b.spoken(), **_WAVE),
    _audio("WavLMForCTC", b.spoken(), **_WAVE),
    _audio("Data2VecAudioForCTC", b.spoken(), conv_pos_kernel_size=5,
           **_WAVE | {"num_conv_pos_embeddings": 2}),
    _audio("Wav2Vec2BertForCTC", b.spectrogram(20, 16), feature_projection_input_dim=16),
    _audio("WhisperForConditionalGeneration", b.spectrogram(8, 64), num_mel_bins=8),
    _audio("Speech2TextForConditionalGeneration", b.spectrogram(32, 8), input_feat_per_channel=8,
           conv_channels=16, num_conv_layers=2, conv_kernel_sizes=[3, 3]),
    _audio("ASTForAudioClassification", b.sound_class, num_mel_bins=8, max_length=24,
           time_stride=8, frequency_stride=8),
    _audio("EncodecModel", b.mono(), codebook_dim=16, num_lstm_layers=1, **_CODEC),
    _audio("VitsModel", b.only_ids, flow_size=16, spectrogram_bins=8, upsample_rates=[2, 2],
           upsample_kernel_sizes=[4, 4], upsample_initial_channel=8, resblock_kernel_sizes=[3],
           resblock_dilation_sizes=[[1, 2, 3]], prior_encoder_num_flows=1,
           posterior_encoder_num_wavenet_layers=1, prior_encoder_num_wavenet_layers=1,
           duration_predictor_num_flows=1, duration_predictor_filter_channels=16,
           depth_separable_num_layers=1, use_stochastic_duration_prediction=False),
    _audio("SpeechT5ForSpeechToText", b.spoken(), **_WAVE | {"vocab_size": 48}),
    _audio("SeamlessM4Tv2ForSpeechToText", b.spectrogram(16, 16), feature_projection_input_dim=16,
           speech_encoder_layers=1, speech_encoder_attention_heads=2,
           speech_encoder_intermediate_size=24, t2u_encoder_layers=1, t2u_decoder_layers=1),
    _audio("MusicgenForConditionalGeneration", b.codes, text_encoder={"model_type": "t5"},
           audio_encoder={"model_type": "encodec", "num_lstm_layers": 1, **_CODEC},
           decoder={"num_codebooks": 2, "vocab_size": 16, "pad_token_id": 16, "bos_token_id": 16}),
    # several kinds at once
    _several("CLIPModel", b.pairs(), text_config={"eos_token_id": 1}),
    _several("BlipForConditionalGeneration", b.caption, text_config={"encoder_hidden_size": 16}),
    _several("Blip2ForConditionalGeneration", b.image_in_text(3), num_query_tokens=3,
             qformer_config={"encoder_hidden_size": 16}, text_config={"model_type": "opt"},
             image_token_index=47),
    _several("FlavaModel", b.image_and_text()),
    _several("ViltForQuestionAnswering", b.answer, max_image_length=-1),
    _several("LxmertForPreTraining", b.regions, l_layers=1, x_layers=1, r_layers=1,
             visual_feat_dim=16, num_qa_labels=4, num_object_labels=4, num_attr_labels=4,
             task_obj_predict=False, task_qa=False, task_matched=False),
    _several("LlavaForConditionalGeneration", b.image_in_text(4), vision_feature_layer=-1,
             vision_config={"model_type": "clip_vision_model"},
             text_config={"model_type": "llama"}, image_token_index=47),
    _several("Idefics3ForConditionalGeneration", b.image_in_text(1, b.one_of_several_images),
             text_config={"model_type": "llama"}, image_token_id=47, scale_factor=2),
    _several("Qwen2VLForConditionalGeneration", b.patches_in_text,
             vision_config={"depth": 2, "mlp_ratio": 2, "patch_size": 4, "temporal_patch_size": 2,
                            "spatial_merge_size": 2},
             text_config={"rope_parameters": {**_PLAIN_ROPE, "mrope_section": [1, 1, 2]}},
             image_token_id=47, vision_start_token_id=46, vision_end_token_id=45,
             video_token_id=44),
    _several("Kosmos2ForConditionalGeneration", b.image_at_tokens, latent_query_num=3,
             text_config={"layers": 2, "attention_heads": 2}),
    _several("VisionEncoderDecoderModel", b.read_image, encoder={"model_type": "vit"},
             decoder={"model_type": "gpt2", "is_decoder": True, "add_cross_attention": True},
             decoder_start_token_id=0, pad_token_id=2),
    _several("MllamaForConditionalGeneration", b.tiled_image, image_token_index=47,
             vision_config={"num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32,
                            "intermediate_layers_indices": [0], "max_num_tiles": 1,
                            "supported_aspect_ratios": [[1, 1]], "norm_eps": 1e-5},
             text_config={"num_hidden_layers": 3, "cross_attention_layers": [1],
                          "rope_parameters": _PLAIN_ROPE}),
    # series
    _time("PatchTSTForPrediction", b.channels_over_time, context_length=16, prediction_length=4,
          num_input_channels=2, patch_length=4, patch_stride=4),
    _time("TimeSeriesTransformerForPrediction", b.series, **_SERIES),
    _time("DecisionTransformerModel", b.episode, state_dim=5, act_dim=2, max_ep_len=16),
    # other packages
    _timm("test_vit"),
    _timm("test_vit_relpos", img_size=32),
    _timm("test_coatnet", img_size=32),
    _timm("test_convnext"),
    _timm("test_efficientnet"),
    _timm("test_resnet"),
    _timm("test_nfnet"),
    _timm("test_byobnet"),
    _timm("test_mambaout"),
    _torchvision("VisionTransformer", b.images(), image_size=32, patch_size=8, num_layers=2,
                 num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5),
    _torchvision("SwinTransformer", b.images(), patch_size=[4, 4], embed_dim=8, depths=[1, 1],
                 num_heads=[2, 2], window_size=[2, 2], stochastic_depth_prob=0.0, num_classes=5),
    _torchvision("DenseNet", b.images(), growth_rate=4, block_config=(2, 2), num_init_features=8,
                 num_classes=5),
    _torchvision("MNASNet", b.images(), alpha=0.1, num_classes=5),
    _torchvision("ShuffleNetV2", b.images(), stages_repeats=[1, 1, 1], num_classes=5,
                 stages_out_channels=[8, 16, 16, 16, 32]),
    _torchvision("squeezenet1_1", b.images(64), num_classes=5),
])  # fmt: skip

# ------------------------------------------------------------------ exceptions

_MIXED = "plain PyTorch refuses parameters in bf16 beside what the model keeps in fp32: "
_STATISTICS = _MIXED + "the statistics of BatchNorm"
_COMPUTED = _MIXED + "values that it computes itself"

NO_BF16: Mapping[str, str] = {
    **dict.fromkeys(
        ("ResNetForImageClassification", "MobileViTForImageClassification",
         "LevitForImageClassification", "SegformerForSemanticSegmentation", "PatchTSTForPrediction",
         "timm test_coatnet", "timm test_efficientnet", "timm test_resnet", "timm test_byobnet",
         "torchvision DenseNet", "torchvision MNASNet", "torchvision ShuffleNetV2"),
        _STATISTICS,
    ),
    **dict.fromkeys(
        ("NllbMoeForConditionalGeneration", "DetrForObjectDetection",
         "DeformableDetrForObjectDetection", "RTDetrForObjectDetection",
         "Speech2TextForConditionalGeneration", "EncodecModel", "SpeechT5ForSpeechToText",
         "SeamlessM4Tv2ForSpeechToText", "MusicgenForConditionalGeneration",
         "Kosmos2ForConditionalGeneration", "timm test_vit_relpos"),
        _COMPUTED,
    ),
}  # fmt: skip
"""Why a model is not trained in bf16."""

NO_CHECKPOINTING: Mapping[str, str] = dict.fromkeys(
    ("AlbertForMaskedLM", "FunnelForMaskedLM", "XLNetLMHeadModel", "XLMWithLMHeadModel",
     "PerceiverForMaskedLM", "JetMoeForCausalLM", "FSMTForConditionalGeneration",
     "ConvNextForImageClassification", "ResNetForImageClassification",
     "LevitForImageClassification", "PoolFormerForImageClassification", "RTDetrForObjectDetection",
     "MaskFormerModel", "GroundingDinoForObjectDetection", "EncodecModel", "LxmertForPreTraining",
     "PatchTSTForPrediction", "DecisionTransformerModel",
     *(name for name in MODELS if name.startswith("torchvision"))),
    "the model offers no gradient checkpointing",
)  # fmt: skip
"""Why a model is not trained with gradient checkpointing."""
