/* Comparisons and field-wise changes of GroupSpec messages, by their descriptors. */
#include <stdlib.h>
#include <string.h>

#include "spec.h"

/* ---- taking fields --------------------------------------------------------------- */

static void swap(ProtobufCMessage *a, ProtobufCMessage *b, size_t offset, size_t size)
{
    uint8_t temporary[8], *x = (uint8_t *)a + offset, *y = (uint8_t *)b + offset;

    memcpy(temporary, x, size);
    memcpy(x, y, size);
    memcpy(y, temporary, size);
}

static size_t size_of(const ProtobufCFieldDescriptor *field)
{
    if (field->label == PROTOBUF_C_LABEL_REPEATED)
        return sizeof(void *);
    switch (field->type) {
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_DOUBLE: return 8;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE: return sizeof(void *);
    default: return 4; /* what else GroupSpec has: uint32, enum */
    }
}

ep_status ep_spec_take(const Ep__V1__GroupSpec *base, const Ep__V1__GroupSpec *from, char *const *fields,
                       size_t n, Ep__V1__GroupSpec **out, struct ep_error *error)
{
    const ProtobufCMessageDescriptor *descriptor = base->base.descriptor;
    const ProtobufCFieldDescriptor *field;
    Ep__V1__GroupSpec *into, *source;

    if (!n)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "fields is empty: name the fields of spec to change");
    if (n > descriptor->n_fields) /* each is compared with all before it */
        return ep_error_set(error, EP_INVALID_ARGUMENT, "fields has %zu entries: must be at most %u, as GroupSpec has no more",
                            n, descriptor->n_fields);
    for (size_t i = 0; i < n; i++)
        if (!protobuf_c_message_descriptor_get_field_by_name(descriptor, fields[i]))
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "fields has \"%.64s\": must be names of GroupSpec fields, as ll_max_tokens",
                                fields[i]);
    into = ep_message_copy(&base->base);
    source = ep_message_copy(&from->base);
    for (size_t i = 0; i < n; i++) {
        bool again = false;

        for (size_t j = 0; j < i; j++)
            again |= !strcmp(fields[i], fields[j]);
        if (again)
            continue; /* a second swap would undo the first */
        field = protobuf_c_message_descriptor_get_field_by_name(descriptor, fields[i]);
        swap(&into->base, &source->base, field->offset, size_of(field));
        if (field->label == PROTOBUF_C_LABEL_REPEATED)
            swap(&into->base, &source->base, field->quantifier_offset, sizeof(size_t));
    }
    ep__v1__group_spec__free_unpacked(source, NULL);
    *out = into;
    return EP_OK;
}

/* ---- what is not for everybody --------------------------------------------------- */

void ep_spec_hide_token(Ep__V1__GroupSpec *spec)
{
    Ep__V1__AttachToken *shown;

    if (!spec->attach_token || spec->attach_token->state_case == EP__V1__ATTACH_TOKEN__STATE_SET)
        return;
    shown = malloc(sizeof *shown);
    if (!shown)
        abort(); /* as in arena.c */
    ep__v1__attach_token__init(shown);
    shown->state_case = EP__V1__ATTACH_TOKEN__STATE_SET;
    shown->set = true;
    ep__v1__attach_token__free_unpacked(spec->attach_token, NULL);
    spec->attach_token = shown;
}

/* ---- comparing ------------------------------------------------------------------- */

bool ep_spec_same(const Ep__V1__GroupSpec *a, const Ep__V1__GroupSpec *b)
{
    return ep_message_same(&a->base, &b->base);
}

bool ep_spec_same_epoch(const Ep__V1__GroupSpec *a, const Ep__V1__GroupSpec *b)
{
    Ep__V1__GroupSpec x = *a, y = *b;

    x.timeout_ms = y.timeout_ms = 0;
    x.direct = y.direct = EP__V1__DIRECT__DIRECT_UNSPECIFIED;
    x.n_labels = y.n_labels = 0;
    x.attach_token = y.attach_token = NULL;
    return ep_message_same(&x.base, &y.base);
}
