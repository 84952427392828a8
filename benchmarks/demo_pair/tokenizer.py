"""The tokenizer: a sentencepiece BPE model and the tokenizer.json that gives the same tokens."""

import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

MARKERS = (
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|think|>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
)
CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>")
VOCABULARY = 2816


def train_tokenizer(texts: list[str], out: Path) -> None:
    """Write tokenizer.model, tokenizer.json and tokenizer_config.json to `out`."""
    lines = [part for text in texts for line in text.split("\n") for part in _without_markers(line) if part]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        user_defined_symbols=[*MARKERS, "\n", "▁▁▁▁"],
        num_threads=1,
        max_sentence_length=20000,
        minloglevel=2,
    )
    (out / "tokenizer.model").write_bytes(written.getvalue())
    write_fast_tokenizer(out)


def _without_markers(line: str) -> list[str]:
    for marker in (*MARKERS, "<bos>"):
        line = line.replace(marker, "\n")
    return line.split("\n")


def write_fast_tokenizer(out: Path) -> None:
    """Write the tokenizer.json and tokenizer_config.json that agree with `out`/tokenizer.model."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    plain = [
        p
        for i, p in enumerate(pieces)
        if not model.is_byte(i) and p not in (*MARKERS, *CONTROL, "\n", "▁▁▁▁")
    ]
    # every split of a piece into two known pieces may be merged, in the order of the pieces' scores
    merges = [
        (p[:i], p[i:]) for p in plain for i in range(1, len(p)) if p[:i] in vocabulary and p[i:] in vocabulary
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (*CONTROL, *MARKERS)]
    )
    tokenizer.add_tokens([AddedToken("\n", normalized=False), AddedToken("▁▁▁▁", normalized=True)])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "additional_special_tokens": list(MARKERS),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 4096,
        "add_bos_token": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
