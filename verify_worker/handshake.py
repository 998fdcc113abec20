"""What both workers must agree on before a drafter is accepted."""

from protocol.messages import PeerHello

COMPARED_FIELDS = (
    "protocol_version",
    "target_fingerprint",
    "vocab_size",
    "hidden_size",
    "tap_layers",
    "decoder_layers",
    "num_draft_tokens",
    "dtype",
    "max_model_len",
    "max_num_seqs",
)


def difference(ours: PeerHello, theirs: PeerHello) -> str | None:
    """The first thing that differs, in words; None when the two fit."""
    if theirs.role != "drafter":
        return f"the peer is a {theirs.role}, not a drafter"
    for field in COMPARED_FIELDS:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return f"{field} differs: the verifier has {mine}, the drafter {other}"
    return None
