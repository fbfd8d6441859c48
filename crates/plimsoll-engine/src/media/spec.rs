//! Media items, and the media that a model takes.

use std::sync::Arc;

use plimsoll_formats::Whisper;
use plimsoll_media::audio::Mel;
use plimsoll_media::geometry::{AudioRule, ImageRule, Patches, VideoRule};
use plimsoll_media::image::{Normalize, Rgb, patchify, patchify_len};
use plimsoll_media::{ContentKey, Modality, OutputPool, Shape, Size, Staged, Staging};
use plimsoll_models::{EncoderKind, Grid, PlaceRule};

/// One medium of a request, or one of the pieces of an image that are encoded one by one.
#[derive(Clone, Debug)]
pub struct MediaItem {
    /// Content and processing: [`ContentKey::of`] the item's bytes with [`MediaSpec::parameters`] and the request's own parameters.
    pub key: ContentKey,
    /// Sizes after the model's processor; `shape.tokens` placeholders of its kind stand in the prompt.
    pub shape: Shape,
    /// The grid of patches, or the frames of the spectrogram.
    pub grid: Grid,
    /// Index of the item's first placeholder token in the prompt. The others follow before the next item's, without a gap or with text
    /// between groups of frames. Placeholders of a video and of its audio track take turns.
    pub first: u32,
    /// Seconds from one group of frames of a video to the next; `None` for other media.
    pub seconds: Option<f32>,
    /// Whether this is the audio track of the video before it. Its placeholders then stand among those of the video's frames.
    pub of_video: bool,
    /// The pixels or the spectrogram. Requests of the same prompt share them.
    pub pixels: Arc<Pixels>,
}

/// The encoder's input for an item, and the host bytes that are reserved for it.
#[derive(Debug)]
pub struct Pixels {
    /// One image, its tiles, one of its pieces, or the sampled frames of a video, all of `grid`'s size. Empty for an audio clip.
    pub frames: Vec<Rgb>,
    /// An audio clip's spectrogram, frame by frame; empty for other media.
    pub spectrogram: Vec<f32>,
    /// Their reservation in [`MediaSpec::staging`]. Windows of one clip share it.
    pub staged: Arc<Staged>,
}

/// The media that the engine's model takes, and their limits.
#[derive(Clone, Debug)]
pub struct MediaSpec {
    /// Rules and limits of images; `None` if the model takes none.
    pub image: Option<ImageSpec>,
    /// Rules and limits of videos, given as lists of frames; `None` if the model takes none.
    pub video: Option<VideoSpec>,
    /// Rules and limits of audio clips; `None` if the model takes none.
    pub audio: Option<AudioSpec>,
    /// The processing as text, for content keys.
    pub parameters: String,
    /// The rule by which the family places media among a text's positions; `None`: by index.
    pub places: Option<PlaceRule>,
    /// Whether the tokens of an image attend to each other in the language model, so that they are computed in one step.
    pub image_in_one_step: bool,
    /// How the family's processor writes media into prompts.
    pub spelling: Spelling,
    /// The most items in one request.
    pub items_max: usize,
    /// The most items that are encoded together.
    pub batch: usize,
    /// Host bytes for media. A caller reserves the bytes of decoding before it decodes, and keeps those of pixels and spectrograms until
    /// the request ends.
    pub staging: Staging,
    /// The pool of encoder outputs: all items of one request must fit into it.
    pub outputs: OutputPool,
}

/// The text that a processor puts in place of a medium's placeholder, which a template has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// The placeholder stays as it is.
    Plain,
    /// The placeholder stays as it is, except for a video with its audio track. Such a video stands between two words, and tokens of frames
    /// and of audio take turns ([`PlaceRule::interleave`]). Qwen2.5-Omni, Qwen3-Omni.
    Interleaved {
        /// The word before.
        start: String,
        /// The word after.
        end: String,
    },
    /// Every group of a video's frames follows the time at which it is shown: Qwen3-VL and later.
    Timed,
    /// A template writes a word for an image. It becomes a paragraph: the word, the image's placeholders and another word. Gemma 3.
    Paragraph {
        /// The word before, which templates write.
        start: String,
        /// The word after.
        end: String,
    },
    /// An image stands between two words. Each of its pieces that are encoded one by one follows a word: a tile its row and column, the
    /// whole image a word of its own. LFM2-VL.
    Pieces {
        /// The word before.
        start: String,
        /// The word after.
        end: String,
        /// The word before the whole image.
        whole: String,
    },
    /// The tokens of an image stand in rows. One token follows each row, another the last. Mistral 3.
    Rows {
        /// The token after a row.
        next: String,
        /// The token after the last row.
        end: String,
    },
    /// Squares of an image are encoded one by one. Each follows the word `around` and its row and column; each row of squares is a line.
    /// The whole image follows `around` and `whole`, and another `around` ends it. Idefics3.
    Squares {
        /// The word around squares and the whole image.
        around: String,
        /// The word before the whole image.
        whole: String,
    },
    /// A template writes a word for an image, which stands between two other words. Tiles that are encoded one by one come first: `column`
    /// separates two tiles of a row, and `row` ends a row. The template's word and the whole image follow. Llama 4.
    Tiled {
        /// The word that templates write.
        image: String,
        /// The word before.
        start: String,
        /// The word after.
        end: String,
        /// The word between two tiles of a row.
        column: String,
        /// The word after a row.
        row: String,
    },
    /// Images stand between two words. The frames of a video do as well, each in a line with its number. A template's word for a video
    /// never reaches the model. InternVL.
    Framed {
        /// The word before.
        start: String,
        /// The word after.
        end: String,
        /// The word for a video.
        video: String,
    },
    /// Images stand between two words. The frames of a video do as well, each after the minute and second at which it is shown. Audio clips
    /// stand between two words of their own. Gemma 4.
    Clocked {
        /// The word before.
        start: String,
        /// The word after.
        end: String,
        /// The word that a template writes for a video.
        video: String,
        /// The words before and after an audio clip.
        audio: [String; 2],
    },
}

/// How images are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSpec {
    /// Resize rule and patch grid.
    pub rule: ImageRule,
    /// Means and standard deviations of the pixel normalization.
    pub normalize: Normalize,
    /// The placeholder token.
    pub placeholder: u32,
    /// The most tokens of one image: all pieces together.
    pub tokens_max: u64,
    /// The largest grids that the rule yields. Every image fits into one of them, turned if need be: in frames, short side and long side
    /// (I6).
    pub bounds: Arc<[Grid]>,
}

/// How lists of frames are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoSpec {
    /// Resize rule, patch grid and sampling.
    pub rule: VideoRule,
    /// Means and standard deviations of the pixel normalization.
    pub normalize: Normalize,
    /// The placeholder token.
    pub placeholder: u32,
    /// The most tokens of one video.
    pub tokens_max: u64,
    /// The grids that were planned. For every video, one of them has at least as many patches and frames at least as large (I6).
    pub bounds: Arc<[Grid]>,
}

/// How audio clips are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct AudioSpec {
    /// The rule that divides a clip into frames and tokens.
    pub rule: AudioRule,
    /// The transform that makes spectrograms.
    pub mel: Arc<Mel>,
    /// The placeholder token.
    pub placeholder: u32,
    /// The most tokens of one audio clip.
    pub tokens_max: u64,
    /// The request that makes the model write a transcript.
    pub transcript: Transcript,
}

/// The error for other requests to a model that decodes one audio clip ([`Transcript::Decoded`]).
pub const TRANSCRIBES_ONLY: &str =
    "this model takes one audio clip, and nothing else: use /v1/audio/transcriptions or /v1/audio/translations";

/// The kind of request that makes a model transcribe an audio clip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transcript {
    /// An instruction beside the clip.
    Instructed,
    /// The clip alone. The answer is `language NAME<asr_text>TEXT`; the prompt can give its beginning, with a language.
    Tagged,
    /// The clip, with tokens for language and task; the model does nothing else. Whisper.
    Decoded(Arc<Whisper>),
}

impl ImageSpec {
    /// The most tokens of an item: of an image, or of one of the pieces that are encoded one by one.
    fn item_tokens(&self) -> u64 {
        match &self.rule {
            ImageRule::Pieces(rule) => rule.piece_tokens(),
            ImageRule::Canvases(rule) => rule.tile_tokens,
            ImageRule::Squares(rule) => rule.square_tokens,
            _ => self.tokens_max,
        }
    }

    /// The most pages of `rows` rows each that the outputs of an image take.
    pub(super) fn output_pages(&self, rows: usize) -> usize {
        self.rule.pieces_max() as usize * (self.item_tokens() as usize).div_ceil(rows)
    }
}

/// Returns the encoder for a kind of media.
pub(crate) fn sense(modality: Modality) -> EncoderKind {
    match modality {
        Modality::Image | Modality::Video => EncoderKind::Vision,
        Modality::Audio => EncoderKind::Audio,
    }
}

/// Copies an encoder's output into a row of the pool, which is as wide as the widest encoder's output. The rest of the row is zero.
pub(crate) fn widen(row: &mut [f32], embedding: &[f32]) {
    let (own, more) = row.split_at_mut(embedding.len());
    own.copy_from_slice(embedding);
    more.fill(0.0);
}

impl MediaSpec {
    /// The placeholder token of a kind of media, and the most tokens of one item; `None` if the model does not take it.
    pub(super) fn kind(&self, modality: Modality) -> Option<(u32, u64)> {
        match modality {
            Modality::Image => self.image.as_ref().map(|image| (image.placeholder, image.item_tokens())),
            Modality::Video => self.video.as_ref().map(|video| (video.placeholder, video.tokens_max)),
            Modality::Audio => self.audio.as_ref().map(|audio| (audio.placeholder, audio.tokens_max)),
        }
    }

    /// The request that makes the model write a transcript; `None` if it takes no audio.
    pub fn transcript(&self) -> Option<Transcript> {
        self.audio.as_ref().map(|audio| audio.transcript.clone())
    }

    /// The most values of the patches of a batch.
    pub(crate) fn patch_values_max(&self) -> usize {
        let of = |kind| {
            self.kind(kind).zip(self.patches(kind)).map_or(0, |((_, tokens), (rule, _))| {
                tokens * rule.merge * rule.merge * 3 * rule.temporal * rule.patch * rule.patch
            })
        };
        let longest = self.audio.as_ref().map_or(0, |audio| audio.rule.frames_max() * audio.mel.bands() as u64);
        self.batch * Modality::ALL.into_iter().map(of).max().unwrap_or(0).max(longest) as usize
    }

    /// Values of the patches of these grids.
    pub(crate) fn values_of(&self, sense: EncoderKind, grids: &[Grid]) -> usize {
        let rule = self.patches(Modality::Image).or_else(|| self.patches(Modality::Video));
        let width = match sense {
            EncoderKind::Vision => rule.map_or(0, |(rule, _)| (3 * rule.temporal * rule.patch * rule.patch) as usize),
            EncoderKind::Audio => self.audio.as_ref().map_or(0, |audio| audio.mel.bands()),
        };
        grids.iter().map(Grid::patches).sum::<usize>() * width
    }

    /// Tokens of an item.
    pub(crate) fn tokens_of(&self, sense: EncoderKind, grid: &Grid) -> usize {
        match sense {
            EncoderKind::Vision => {
                let rule = self.patches(Modality::Image).or_else(|| self.patches(Modality::Video));
                grid.patches() / rule.map_or(1, |(rule, _)| (rule.merge * rule.merge) as usize)
            }
            EncoderKind::Audio => {
                self.audio.as_ref().map_or(0, |audio| audio.rule.tokens(grid.patches() as u64) as usize)
            }
        }
    }

    /// Appends the encoder's input for an item to `values`.
    pub(crate) fn write_patches(&self, modality: Modality, pixels: &Pixels, values: &mut Vec<f32>) {
        match self.patches(modality) {
            Some((rule, normalize)) => {
                let first = values.len();
                values.resize(first + patchify_len(rule, pixels.frames.len(), pixels.frames[0].size), 0.0);
                patchify(&pixels.frames, rule, normalize, &mut values[first..]);
            }
            None => values.extend_from_slice(&pixels.spectrogram),
        }
    }

    /// The patch grid and normalization of a kind of media; `None` for audio.
    pub(crate) fn patches(&self, modality: Modality) -> Option<(&Patches, &Normalize)> {
        match modality {
            Modality::Image => self.image.as_ref().map(|image| (image.rule.patches(), &image.normalize)),
            Modality::Video => self.video.as_ref().map(|video| (video.rule.patches(), &video.normalize)),
            Modality::Audio => None,
        }
    }

    /// The only size that the encoder takes for a kind of media; `None` where it takes several.
    pub(super) fn tile(&self, modality: Modality) -> Option<Size> {
        match modality {
            Modality::Image => self.image.as_ref().and_then(|image| image.rule.tile()),
            Modality::Video => self.video.as_ref().and_then(|video| video.rule.tile()),
            Modality::Audio => None,
        }
    }

    /// Whether a token stands for a part of a medium.
    pub fn is_placeholder(&self, token: u32) -> bool {
        Modality::ALL.into_iter().any(|kind| self.kind(kind).is_some_and(|(placeholder, _)| placeholder == token))
    }

    /// Whether a token stands for a part of an image or video, whose positions have two dimensions. Audio tokens follow one another as text
    /// tokens do.
    pub(crate) fn is_plane(&self, token: u32) -> bool {
        let of = |kind| self.kind(kind).is_some_and(|(placeholder, _)| placeholder == token);
        [Modality::Image, Modality::Video].into_iter().any(of)
    }
}
