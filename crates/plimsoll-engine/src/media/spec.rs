//! Media items, and what the model takes of them.

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
    /// Its content and processing: [`ContentKey::of`] its bytes with [`MediaSpec::parameters`] and whatever the request asked for
    /// besides.
    pub key: ContentKey,
    /// What the model's processor makes of it; `shape.tokens` placeholders of its kind stand in the prompt.
    pub shape: Shape,
    /// Its patches, or the frames of its spectrogram.
    pub grid: Grid,
    /// Index of its first placeholder token in the prompt. The others follow, without a gap or (between groups of frames) with text
    /// among them, before the next item's. Those of a video and of its audio track take turns.
    pub first: u32,
    /// Of a video, the seconds from one group of frames to the next; none for all else.
    pub seconds: Option<f32>,
    /// It is the audio track of the video before it, and its placeholders stand among those of the video's frames.
    pub of_video: bool,
    /// What it looks or audio clips like. Requests of the same prompt share it.
    pub pixels: Arc<Pixels>,
}

/// What an item is encoded from, and the host bytes that are reserved for it.
#[derive(Debug)]
pub struct Pixels {
    /// One image, its tiles, one of its pieces, or the sampled frames of a video: all of the size that `grid` says. None of an audio clip.
    pub frames: Vec<Rgb>,
    /// An audio clip's spectrogram, frame by frame; empty for all else.
    pub spectrogram: Vec<f32>,
    /// Their reservation in [`MediaSpec::staging`]. Windows of one clip share it.
    pub staged: Arc<Staged>,
}

/// What the engine's model takes besides text, and within which limits.
#[derive(Clone, Debug)]
pub struct MediaSpec {
    /// Images.
    pub image: Option<ImageSpec>,
    /// Lists of frames.
    pub video: Option<VideoSpec>,
    /// Audio clips.
    pub audio: Option<AudioSpec>,
    /// The processing in words, for keys of content.
    pub parameters: String,
    /// How the family places media among the positions of a text; none: by their index.
    pub places: Option<PlaceRule>,
    /// Whether the tokens of an image attend to each other in the language model, so that they are computed in one step.
    pub image_in_one_step: bool,
    /// How the family's processor writes media into prompts.
    pub spelling: Spelling,
    /// Items in one request, at most.
    pub items_max: usize,
    /// Items that are encoded together, at most.
    pub batch: usize,
    /// Host bytes for media: reserve what decoding takes before decoding, keep what pixels and spectrograms take until the request has
    /// ended.
    pub staging: Staging,
    /// Where encoder outputs go: what one request's items need must fit into it.
    pub outputs: OutputPool,
}

/// What a processor makes of the placeholder that a template has written for a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// It is left as it is.
    Plain,
    /// It is left as it is, but for a video with its audio track: this stands between two words, and tokens of frames and of audio
    /// take turns ([`PlaceRule::interleave`]). Qwen2.5-Omni, Qwen3-Omni.
    Interleaved {
        /// The word before.
        start: String,
        /// The word after.
        end: String,
    },
    /// Every group of a video's frames stands behind the time at which it is shown: Qwen3-VL and later.
    Timed,
    /// A template writes a word for an image. It becomes a paragraph: the word, the image's placeholders and another word. Gemma 3.
    Paragraph {
        /// The word before, which templates write.
        start: String,
        /// The word after.
        end: String,
    },
    /// An image stands between two words, and behind a word each of its pieces that are encoded one by one: a tile behind its row and
    /// column, the whole image behind one of its own. LFM2-VL.
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
    /// Squares of an image that are encoded one by one stand behind a word and their row and column, each row in a line of its own; the
    /// whole image stands between that word and, behind its own, the same word again. Idefics3.
    Squares {
        /// The word around.
        around: String,
        /// The word before the whole image.
        whole: String,
    },
    /// A template writes a word for an image, which stands between two others: tiles that are encoded one by one, a word between two of a
    /// row and another behind each row, then the template's word and the whole image. Llama 4.
    Tiled {
        /// The word that templates write.
        image: String,
        /// The word before.
        start: String,
        /// The word after.
        end: String,
        /// The word between two tiles of a row.
        column: String,
        /// The word behind a row.
        row: String,
    },
    /// Images stand between two words. So do the frames of a video, each in a line with its number; what a template writes for a
    /// video is a word that the model never sees. InternVL.
    Framed {
        /// The word before.
        start: String,
        /// The word after.
        end: String,
        /// The word for a video.
        video: String,
    },
    /// Images stand between two words. So do the frames of a video, each behind the minute and second at which it is shown. Audio clips
    /// stand between two words of their own. Gemma 4.
    Clocked {
        /// The word before.
        start: String,
        /// The word after.
        end: String,
        /// What a template writes for a video.
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
    /// Means and deviations.
    pub normalize: Normalize,
    /// The placeholder token.
    pub placeholder: u32,
    /// Tokens of one image, at most: all pieces together.
    pub tokens_max: u64,
    /// The largest grids that the rule yields: no image has more frames, a longer short side and a longer long side than one of
    /// them (I6).
    pub bounds: Arc<[Grid]>,
}

/// How lists of frames are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoSpec {
    /// Resize rule, patch grid and sampling.
    pub rule: VideoRule,
    /// Means and deviations.
    pub normalize: Normalize,
    /// The placeholder token.
    pub placeholder: u32,
    /// Tokens of one video, at most.
    pub tokens_max: u64,
    /// The grids that were planned: no video has more patches and larger frames than one of them (I6).
    pub bounds: Arc<[Grid]>,
}

/// How audio clips are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct AudioSpec {
    /// How a clip becomes frames and tokens.
    pub rule: AudioRule,
    /// Makes spectrograms.
    pub mel: Arc<Mel>,
    /// The placeholder token.
    pub placeholder: u32,
    /// Tokens of one audio clip, at most.
    pub tokens_max: u64,
    /// How the model is asked for a transcript.
    pub transcript: Transcript,
}

/// Why a model that is a decoder of an audio clip takes no other request ([`Transcript::Decoded`]).
pub const TRANSCRIBES_ONLY: &str =
    "this model takes one audio clip, and nothing else: use /v1/audio/transcriptions or /v1/audio/translations";

/// How a model is asked to transcribe an audio clip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transcript {
    /// By an instruction beside the clip.
    Instructed,
    /// By the clip alone. The answer is `language NAME<asr_text>TEXT`; the prompt may give its beginning, with a language.
    Tagged,
    /// By the clip and tokens for language and task: the model does nothing else. Whisper.
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

    /// Pages of so many rows that the outputs of an image take at most.
    pub(super) fn output_pages(&self, rows: usize) -> usize {
        self.rule.pieces_max() as usize * (self.item_tokens() as usize).div_ceil(rows)
    }
}

/// The encoder that a kind goes through.
pub(crate) fn sense(modality: Modality) -> EncoderKind {
    match modality {
        Modality::Image | Modality::Video => EncoderKind::Vision,
        Modality::Audio => EncoderKind::Audio,
    }
}

/// Writes what an encoder has made into a row of the pool, which is as wide as the widest encoder's: the model's first layers are given
/// nothing more of what has no more.
pub(crate) fn widen(row: &mut [f32], embedding: &[f32]) {
    let (own, more) = row.split_at_mut(embedding.len());
    own.copy_from_slice(embedding);
    more.fill(0.0);
}

impl MediaSpec {
    /// The placeholder token of a kind, if the model takes it, and the most tokens of one item.
    pub(super) fn kind(&self, modality: Modality) -> Option<(u32, u64)> {
        match modality {
            Modality::Image => self.image.as_ref().map(|image| (image.placeholder, image.item_tokens())),
            Modality::Video => self.video.as_ref().map(|video| (video.placeholder, video.tokens_max)),
            Modality::Audio => self.audio.as_ref().map(|audio| (audio.placeholder, audio.tokens_max)),
        }
    }

    /// How the model is asked for a transcript; none if it takes no audio.
    pub fn transcript(&self) -> Option<Transcript> {
        self.audio.as_ref().map(|audio| audio.transcript.clone())
    }

    /// Values of the patches of a batch, at most.
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

    /// Appends what an encoder reads of an item.
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

    /// The patch grid of a kind.
    pub(crate) fn patches(&self, modality: Modality) -> Option<(&Patches, &Normalize)> {
        match modality {
            Modality::Image => self.image.as_ref().map(|image| (image.rule.patches(), &image.normalize)),
            Modality::Video => self.video.as_ref().map(|video| (video.rule.patches(), &video.normalize)),
            Modality::Audio => None,
        }
    }

    /// The only size that the encoder sees of a kind, where there is one.
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

    /// Whether a token stands for a part of what lies in a plane: not for an audio clip's, which stand one after another as a text's do.
    pub(crate) fn is_plane(&self, token: u32) -> bool {
        let of = |kind| self.kind(kind).is_some_and(|(placeholder, _)| placeholder == token);
        [Modality::Image, Modality::Video].into_iter().any(of)
    }
}
