/* The functions of cuDNN that repro.microconv.cudnn calls, on host memory, for tests.
 *
 * Descriptors are checked by what they are, so that operands in the wrong order are an error; the
 * convolutions are plain loops. What was called is kept as text: see stub_log. */

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, BAD_PARAM = 2000, TOO_SMALL = 2006 };
enum { FORWARD = 0, BACKWARD_DATA = 1, BACKWARD_FILTER = 2 };

typedef struct { char what; void *stream; } Handle;
/* A tensor (n, c, h, w) or filters (k, c, rows, columns). */
typedef struct { char what; int format, type, n, c, h, w; } Array;
typedef struct { char what; int pad[2], stride[2], dilation[2], mode, compute, groups, math; } Conv;

static char text[1 << 16];
static size_t used;
static int refused[3][8]; /* status of a run by kind and algorithm */

static void note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    used += vsnprintf(text + used, sizeof text - used, format, arguments);
    if (used >= sizeof text) used = sizeof text - 1;
    va_end(arguments);
}

const char *stub_log(void) { return text; }
void stub_refuse(int kind, int algorithm, int status) { refused[kind][algorithm] = status; }
void stub_reset(void) {
    memset(refused, 0, sizeof refused);
    memset(text, 0, sizeof text);
    used = 0;
}

size_t cudnnGetVersion(void) { return 91234; }

const char *cudnnGetErrorString(int status) {
    switch (status) {
        case BAD_PARAM: return "STUB_BAD_PARAM";
        case TOO_SMALL: return "STUB_SIZE_INSUFFICIENT";
        case 3000: return "STUB_NOT_SUPPORTED";
        case 3002: return "STUB_NOT_SUPPORTED_SHAPE";
        case 5000: return "STUB_EXECUTION_FAILED";
        default: return "STUB_UNKNOWN";
    }
}

int cudnnCreate(void **handle) {
    Handle *made = calloc(1, sizeof *made);
    made->what = 'H';
    *handle = made;
    return OK;
}

int cudnnSetStream(void *handle, void *stream) {
    Handle *h = handle;
    if (!h || h->what != 'H') return BAD_PARAM;
    h->stream = stream;
    return OK;
}

static int create(void **descriptor, char what, size_t size) {
    char *made = calloc(1, size);
    *made = what;
    *descriptor = made;
    return OK;
}
int cudnnCreateTensorDescriptor(void **d) { return create(d, 'T', sizeof(Array)); }
int cudnnCreateFilterDescriptor(void **d) { return create(d, 'F', sizeof(Array)); }
int cudnnCreateConvolutionDescriptor(void **d) { return create(d, 'C', sizeof(Conv)); }

static int set_array(void *descriptor, char what, int format, int type, int n, int c, int h, int w) {
    Array *a = descriptor;
    if (!a || a->what != what || format < 0 || format > 1 || type < 0) return BAD_PARAM;
    if (n < 1 || c < 1 || h < 1 || w < 1) return BAD_PARAM;
    *a = (Array){what, format, type, n, c, h, w};
    return OK;
}
int cudnnSetTensor4dDescriptor(void *d, int format, int type, int n, int c, int h, int w) {
    return set_array(d, 'T', format, type, n, c, h, w);
}
int cudnnSetFilter4dDescriptor(void *d, int type, int format, int k, int c, int h, int w) {
    return set_array(d, 'F', format, type, k, c, h, w);
}

int cudnnSetConvolution2dDescriptor(void *descriptor, int pad_h, int pad_w, int stride_h,
                                    int stride_w, int dilation_h, int dilation_w, int mode,
                                    int compute) {
    Conv *c = descriptor;
    if (!c || c->what != 'C') return BAD_PARAM;
    *c = (Conv){'C', {pad_h, pad_w}, {stride_h, stride_w}, {dilation_h, dilation_w},
                mode, compute, 1, 0};
    return OK;
}
int cudnnSetConvolutionGroupCount(void *descriptor, int groups) {
    Conv *c = descriptor;
    if (!c || c->what != 'C') return BAD_PARAM;
    c->groups = groups;
    return OK;
}
int cudnnSetConvolutionMathType(void *descriptor, int math) {
    Conv *c = descriptor;
    if (!c || c->what != 'C') return BAD_PARAM;
    c->math = math;
    return OK;
}

static int extent(int size, int filter, const Conv *c, int axis) {
    return (size + 2 * c->pad[axis] - c->dilation[axis] * (filter - 1) - 1) / c->stride[axis] + 1;
}

/* Whether input x, filters w and output y belong together. */
static int fit(const Array *x, const Array *w, const Conv *c, const Array *y) {
    return x && w && c && y && x->what == 'T' && w->what == 'F' && c->what == 'C' && y->what == 'T'
        && x->type == w->type && x->type == y->type && x->format == y->format
        && x->format == w->format && x->n == y->n && x->c == w->c * c->groups && w->n == y->c
        && y->h == extent(x->h, w->h, c, 0) && y->w == extent(x->w, w->w, c, 1) && c->mode == 1;
}

static size_t needed(int n, int algorithm) {
    return algorithm ? (size_t)n * 1000 * algorithm + 7 : 0;
}

static const char *const names[] = {"forward", "backward_data", "backward_filter"};

static int query(int kind, Handle *h, const Array *x, const Array *w, const Conv *c, const Array *y,
                 int algorithm, size_t *size) {
    if (!h || h->what != 'H' || !fit(x, w, c, y) || algorithm < 0 || algorithm > 7)
        return BAD_PARAM;
    note("query %s algo=%d n=%d type=%d format=%d math=%d compute=%d groups=%d\n", names[kind],
         algorithm, x->n, x->type, x->format, c->math, c->compute, c->groups);
    *size = needed(x->n, algorithm);
    return OK;
}
int cudnnGetConvolutionForwardWorkspaceSize(void *h, void *x, void *w, void *c, void *y,
                                            int algorithm, size_t *size) {
    return query(FORWARD, h, x, w, c, y, algorithm, size);
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(void *h, void *w, void *dy, void *c, void *dx,
                                                 int algorithm, size_t *size) {
    return query(BACKWARD_DATA, h, dx, w, c, dy, algorithm, size);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(void *h, void *x, void *dy, void *c, void *dw,
                                                   int algorithm, size_t *size) {
    return query(BACKWARD_FILTER, h, x, dw, c, dy, algorithm, size);
}

static size_t at(const Array *a, int n, int c, int h, int w) {
    if (a->format == 0) return (((size_t)n * a->c + c) * a->h + h) * a->w + w;
    return (((size_t)n * a->h + h) * a->w + w) * a->c + c;
}
/* float16: what its bits mean, and the nearest one's bits, ties to even. */
static double from_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double sign = bits >> 15 ? -1 : 1;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}
static uint16_t to_half(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    int exponent;
    value = fabs(value);
    if (value != value) return 0x7e00;
    if (value >= 65520) return sign | 0x7c00;
    frexp(value, &exponent);
    if (exponent < -13) exponent = -13;
    double fraction = nearbyint(ldexp(value, 11 - exponent)); /* below 2^-14 without its leading 1 */
    return sign | (uint16_t)(fraction + 1024 * (exponent + 13));
}
static double rounded(double value, int compute) {
    return compute == 2 ? from_half(to_half(value)) : value;
}
static double get(const Array *a, const void *values, size_t i) {
    if (a->type == 2) return from_half(((const uint16_t *)values)[i]);
    return a->type == 1 ? ((const double *)values)[i] : (double)((const float *)values)[i];
}
static size_t count(const Array *a) { return (size_t)a->n * a->c * a->h * a->w; }

/* out = alpha * result + beta * out; with beta 0 what was in out is not read. */
static int run(int kind, Handle *handle, const void *alpha, const Array *x, const void *xs,
               const Array *w, const void *ws, const Conv *c, int algorithm, void *workspace,
               size_t size, const void *beta, const Array *y, const void *ys, void *out) {
    if (!handle || handle->what != 'H' || !fit(x, w, c, y)) return BAD_PARAM;
    if (x->type > 2) return 3000;
    double a = x->type == 1 ? *(const double *)alpha : *(const float *)alpha;
    double b = x->type == 1 ? *(const double *)beta : *(const float *)beta;
    note("run %s algo=%d n=%d alpha=%g beta=%g math=%d compute=%d stream=%zu workspace=%zu\n",
         names[kind], algorithm, x->n, a, b, c->math, c->compute, (size_t)handle->stream, size);
    if (refused[kind][algorithm]) return refused[kind][algorithm];
    if (size < needed(x->n, algorithm)) return TOO_SMALL;
    if (size) memset(workspace, 0xAB, needed(x->n, algorithm));

    const Array *target = kind == FORWARD ? y : kind == BACKWARD_DATA ? x : w;
    double *sum = calloc(count(target), sizeof *sum);
    int of_group = y->c / c->groups;
    for (int n = 0; n < y->n; n++)
    for (int k = 0; k < y->c; k++)
    for (int p = 0; p < y->h; p++)
    for (int q = 0; q < y->w; q++)
    for (int j = 0; j < w->c; j++)
    for (int v = 0; v < w->h; v++)
    for (int u = 0; u < w->w; u++) {
        int row = p * c->stride[0] - c->pad[0] + v * c->dilation[0];
        int column = q * c->stride[1] - c->pad[1] + u * c->dilation[1];
        if (row < 0 || row >= x->h || column < 0 || column >= x->w) continue;
        size_t in_x = at(x, n, k / of_group * w->c + j, row, column);
        size_t in_w = at(w, k, j, v, u), in_y = at(y, n, k, p, q);
        double *to = kind == FORWARD ? &sum[in_y] : kind == BACKWARD_DATA ? &sum[in_x] : &sum[in_w];
        double product = (kind == BACKWARD_DATA ? get(y, ys, in_y) : get(x, xs, in_x))
            * (kind == BACKWARD_FILTER ? get(y, ys, in_y) : get(w, ws, in_w));
        *to = rounded(*to + rounded(product, c->compute), c->compute);
    }
    for (size_t i = 0; i < count(target); i++) {
        double value = a * sum[i] + (b != 0 ? b * get(target, out, i) : 0);
        if (target->type == 2) ((uint16_t *)out)[i] = to_half(value);
        else if (target->type) ((double *)out)[i] = value;
        else ((float *)out)[i] = (float)value;
    }
    free(sum);
    return OK;
}
int cudnnConvolutionForward(void *h, void *alpha, void *xd, void *x, void *wd, void *w, void *c,
                            int algorithm, void *workspace, size_t size, void *beta, void *yd,
                            void *y) {
    return run(FORWARD, h, alpha, xd, x, wd, w, c, algorithm, workspace, size, beta, yd, NULL, y);
}
int cudnnConvolutionBackwardData(void *h, void *alpha, void *wd, void *w, void *dyd, void *dy,
                                 void *c, int algorithm, void *workspace, size_t size, void *beta,
                                 void *dxd, void *dx) {
    return run(BACKWARD_DATA, h, alpha, dxd, NULL, wd, w, c, algorithm, workspace, size, beta, dyd,
               dy, dx);
}
int cudnnConvolutionBackwardFilter(void *h, void *alpha, void *xd, void *x, void *dyd, void *dy,
                                   void *c, int algorithm, void *workspace, size_t size, void *beta,
                                   void *dwd, void *dw) {
    return run(BACKWARD_FILTER, h, alpha, xd, x, dwd, NULL, c, algorithm, workspace, size, beta,
               dyd, dy, dw);
}
