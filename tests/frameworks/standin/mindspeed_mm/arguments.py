"""Stand-in: adds the program's own arguments behind those of the script."""


def extra_args_provider_decorator(extra_args_provider):
    def provide(parser):
        parser = extra_args_provider(parser) if extra_args_provider else parser
        parser.add_argument("--extra-of-mindspeed-mm", action="store_true")
        return parser

    return provide
