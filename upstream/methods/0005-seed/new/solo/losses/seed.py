import torch
import torch.nn.functional as F


def seed_loss_func(
    student: torch.Tensor,
    teacher: torch.Tensor,
    queue: torch.Tensor,
    student_temperature: float = 0.2,
    teacher_temperature: float = 0.01,
) -> torch.Tensor:
    """Computes SEED's loss given a batch of features of the student, of the same images from the
    teacher, and a queue of past features of the teacher.

    Args:
        student (torch.Tensor): NxD Tensor containing the normalized features of the student.
        teacher (torch.Tensor): NxD Tensor containing the normalized features of the teacher.
        queue (torch.Tensor): KxD Tensor containing past features of the teacher.
        student_temperature (float, optional): temperature of the softmax for the student.
            Defaults to 0.2.
        teacher_temperature (float, optional): temperature of the softmax for the teacher. With
            the 1e-4 of the official code, the image itself is the only target. Defaults to 0.01.

    Returns:
        torch.Tensor: SEED loss.
    """

    # low temperatures need all the digits of the similarities, which mixed precision would drop
    with torch.autocast(device_type=student.device.type, enabled=False):
        student, teacher, queue = student.float(), teacher.float(), queue.float()

        # each image is compared with itself and with the queue
        student_own = torch.einsum("nc,nc->n", [student, teacher]).unsqueeze(-1)
        student_sim = torch.cat([student_own, student @ queue.T], dim=1)
        teacher_own = torch.einsum("nc,nc->n", [teacher, teacher]).unsqueeze(-1)
        teacher_sim = torch.cat([teacher_own, teacher @ queue.T], dim=1)

        targets = F.softmax(teacher_sim.detach() / teacher_temperature, dim=1)
        log_probs = F.log_softmax(student_sim / student_temperature, dim=1)
        return -torch.sum(targets * log_probs, dim=1).mean()
