//! The properties of a text encoder: its tables, the places of its norms, its classifier and its dense layers.

use crate::activation::Activation;
use crate::bounds::{KINDS_MAX, within};
use crate::error::FormatError;

/// The properties of a text encoder besides its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoder {
    /// Rows of the table of positions. Without a table it is 0, and queries and keys are rotated.
    pub positions: usize,
    /// The row of the first position: RoBERTa counts after its padding token.
    pub first_position: usize,
    /// Rows of the table of token types (first and second text of a pair); 0 without one.
    pub token_types: usize,
    /// Whether norms stand before each half of a layer, and one after all layers. Otherwise a norm stands after each half. The first
    /// attention has no norm before it: the embeddings are normed.
    pub norms_before: bool,
    /// Whether norms have biases.
    pub norm_bias: bool,
    /// Whether feed-forward parts have a gate.
    pub gated: bool,
    /// Scores that the classifier gives, if there is a classifier.
    pub labels: Option<usize>,
    /// Whether a score goes through the logistic function before it is reported.
    pub sigmoid: bool,
    /// The layers of the classifier. Unused without labels.
    pub classifier: Classifier,
    /// The dense layers that make an embedding of the hidden states, if the checkpoint has them.
    pub dense: Option<Dense>,
}

/// Dense layers of sentence-transformers after the pooling (`dense.0`, `dense.1`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dense {
    /// Whether the dense layers read the mean of all positions. Otherwise they read the first position.
    pub mean: bool,
    /// The layers, in their order.
    pub layers: [Option<DenseLayer>; 2],
}

/// A dense layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseLayer {
    /// Outputs of the layer.
    pub width: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// Whether tanh follows.
    pub tanh: bool,
}

impl Dense {
    /// Numbers of an embedding.
    pub fn width(&self) -> usize {
        self.layers.iter().flatten().last().map_or(0, |layer| layer.width)
    }
}

/// The layers of a classifier between the hidden states and the scores: a matrix, an activation, and in some models a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classifier {
    /// Whether it reads the mean of all positions. Otherwise it reads the first position.
    pub mean: bool,
    /// The activation.
    pub activation: Activation,
    /// Whether the matrix has a bias.
    pub bias: bool,
    /// Whether a norm follows.
    pub norm: bool,
}

impl Encoder {
    /// The encoder properties of a decoder layout in which every position attends to every other.
    pub(crate) const BIDIRECTIONAL: Self = Self {
        positions: 0,
        first_position: 0,
        token_types: 0,
        norms_before: true,
        norm_bias: false,
        gated: true,
        labels: None,
        sigmoid: true,
        classifier: Classifier { mean: false, activation: Activation::Tanh, bias: true, norm: false },
        dense: None,
    };

    /// BERT's layout: norms with biases after each half of a layer, and no table of positions, token types or gates.
    pub(crate) const PLAIN: Self = Self { norms_before: false, norm_bias: true, gated: false, ..Self::BIDIRECTIONAL };

    pub(crate) fn check(&self) -> Result<(), FormatError> {
        within("type_vocab_size", self.token_types.max(1), KINDS_MAX)?;
        within("labels", self.labels.unwrap_or(1), KINDS_MAX)
    }
}
