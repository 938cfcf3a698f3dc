"""How many drafts were right."""

from dataclasses import dataclass


@dataclass
class DraftStats:
    """Counts since the start. rounds: how often drafts of a sequence were verified. proposed, accepted: drafts.

    accepted_at: of them, those that were the 1st, 2nd, ... of their round.
    """

    rounds: int
    proposed: int
    accepted: int
    accepted_at: list[int]

    @staticmethod
    def of(drafts: int) -> "DraftStats":
        """None yet, of so many a round."""
        return DraftStats(0, 0, 0, [0] * drafts)

    def count(self, proposed: int, accepted: int) -> None:
        """A round in which the first `accepted` of `proposed` drafts were right; none without any."""
        if not proposed:
            return
        self.rounds += 1
        self.proposed += proposed
        self.accepted += accepted
        for at in range(accepted):
            self.accepted_at[at] += 1
