"""Stand-in: patches that there are none of."""


class PatchesManager:
    @staticmethod
    def apply_patches_from_config():
        pass
