/* Words of a text. */
#include "routing_private.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "bench_hash.h"

static ep_status read_all(const char *path, char **bytes, size_t *length, struct ep_error *error)
{
    FILE *file = fopen(path, "re");
    size_t capacity = 0;

    if (!file)
        return ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot open %s", path);
    *bytes = NULL;
    *length = 0;
    do {
        char *more;

        capacity = capacity ? 2 * capacity : 65536;
        more = capacity <= 1u << 30 ? realloc(*bytes, capacity) : NULL;
        if (!more) {
            fclose(file);
            free(*bytes);
            return ep_error_set(error, EP_NO_MEMORY, "%s is larger than a text of words should be", path);
        }
        *bytes = more;
        *length += fread(*bytes + *length, 1, capacity - *length, file);
    } while (*length == capacity);

    bool bad = ferror(file) != 0;

    fclose(file);
    if (!bad)
        return EP_OK;
    free(*bytes);
    return ep_error_set(error, EP_IO, "cannot read %s", path);
}

/* Letters, digits, apostrophes between them, and everything outside ASCII. */
static bool in_word(unsigned char byte)
{
    return byte >= 0x80 || isalnum(byte) || byte == '\'';
}

static uint32_t mark_words(struct routing_text *text, size_t length)
{
    uint32_t words = 0;

    for (size_t i = 0; i < length; i++) {
        size_t start = i;

        for (; i < length && in_word((unsigned char)text->bytes[i]); i++)
            if ((unsigned char)text->bytes[i] < 0x80)
                text->bytes[i] = (char)tolower((unsigned char)text->bytes[i]);
        if (i == start)
            continue;
        text->first[words] = (uint32_t)start;
        text->length[words++] = (uint32_t)(i - start);
    }
    return words;
}

ep_status routing_text_load(const char *path, struct routing_text *text, struct ep_error *error)
{
    size_t length = 0;
    ep_status status = read_all(path, &text->bytes, &length, error);

    if (status != EP_OK) {
        text->bytes = NULL;
        return status;
    }
    text->first = malloc((length / 2 + 1) * sizeof *text->first);
    text->length = malloc((length / 2 + 1) * sizeof *text->length);
    if (!text->first || !text->length)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the words of %s", path);
    text->words = mark_words(text, length);
    if (text->words == 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s has no words", path);
    return EP_OK;
}

void routing_text_free(struct routing_text *text)
{
    free(text->bytes);
    free(text->first);
    free(text->length);
    memset(text, 0, sizeof *text);
}

/* The n-th expert (from 0) of those that topk[0 .. j-1] have not taken. */
static int64_t nth_free(const int64_t *topk, uint32_t j, uint32_t n)
{
    for (int64_t expert = 0;; expert++) {
        bool used = false;

        for (uint32_t i = 0; i < j; i++)
            used = used || topk[i] == expert;
        if (!used && n-- == 0)
            return expert;
    }
}

void routing_text_pick(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                       float *weights)
{
    const struct routing_text *text = &routing->text;
    uint32_t k = routing->shape.top_k;
    uint64_t start = (uint64_t)text->words * rank / routing->shape.ranks;
    uint32_t word = (uint32_t)((start + token) % text->words);

    for (uint32_t j = 0; j < k; j++) {
        uint64_t hash = XXH3_64bits_withSeed(text->bytes + text->first[word], text->length[word],
                                             routing->shape.seed + j);

        topk[j] = nth_free(topk, j, bench_below(hash, routing->shape.experts - j));
        weights[j] = 2.0f * (float)(k - j) / (float)(k * (k + 1)); /* k, k-1, ... 1, normalised */
    }
}
