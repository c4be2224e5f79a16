"""Agreement between the processes of a run."""

from holdfast.coord.agreement import Agreement
from holdfast.coord.shared_folder import HELLO, SharedFolderAgreement
from holdfast.coord.solo import SoloAgreement

__all__ = ["HELLO", "Agreement", "SharedFolderAgreement", "SoloAgreement"]
