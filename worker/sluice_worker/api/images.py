"""Images of a request as pixels: decoded by Pillow in a thread, bounded in bytes and pixels."""

from base64 import b64decode
from binascii import Error as NoBase64
from io import BytesIO

import PIL.Image
import PIL.ImageOps
from sluice_core.errors import RequestError
from sluice_core.model.images import MAX_PIXELS, Pixels
from sluice_frontend.api.pooling.texts import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Others have decoders that start programs or are seldom tried."""
PIL.Image.MAX_IMAGE_PIXELS = None  # `_open` looks at the size, before anything is decoded


class ImageReader:
    """Reads images for one model. `num_rows`: rows of each in the model."""

    def __init__(self, pixels: Pixels, num_rows: int) -> None:
        self._pixels, self.num_rows = pixels, num_rows

    def read(self, image: Image, number: int) -> bytes:
        """uint8 [height, width, 3] of the request's input `number`; raises RequestError."""
        try:
            data = b64decode(image.data, validate=True)
        except (NoBase64, ValueError) as error:
            raise _refused(number, "is no image: neither base64 nor a data URL of it") from error
        try:
            return self._resized(_open(data, number), number)
        except RequestError:
            raise
        except Exception as error:  # Pillow's decoders raise many kinds for broken files
            problem = f"is no image that can be read ({type(error).__name__})"
            raise _refused(number, problem) from error

    def _resized(self, image: PIL.Image.Image, number: int) -> bytes:
        """As transformers' image processors have it."""
        pixels, size = self._pixels, self._pixels.size
        if isinstance(size, int):
            short, long = sorted(image.size)
            longer = int(size * long / short)
            size = (longer, size) if image.width <= image.height else (size, longer)
        height, width = size
        if height * width > MAX_PIXELS:
            raise _refused(number, f"would be resized to {width} x {height} pixels")
        image = image.resize((width, height), resample=PIL.Image.Resampling(pixels.resample))
        if pixels.crop is not None:
            height, width = pixels.crop
            top, left = (image.height - height) // 2, (image.width - width) // 2
            image = image.crop((left, top, left + width, top + height))
        return image.tobytes()


def _open(data: bytes, number: int) -> PIL.Image.Image:
    """The image, upright and in RGB, with no more copies than that takes."""
    image: PIL.Image.Image = PIL.Image.open(BytesIO(data), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        size = f"{image.width} x {image.height}"
        raise _refused(number, f"has {size} pixels; {MAX_PIXELS:,} are possible")
    PIL.ImageOps.exif_transpose(image, in_place=True)
    return image if image.mode == "RGB" else image.convert("RGB")


def _refused(number: int, problem: str) -> RequestError:
    return RequestError(f"input {number} {problem}", param="input")
