"""Agreement between the processes of a run."""

from holdfast.coord.agreement import Agreement
from holdfast.coord.shared_folder import SharedFolderAgreement
from holdfast.coord.solo import SoloAgreement

__all__ = ["Agreement", "SharedFolderAgreement", "SoloAgreement"]
